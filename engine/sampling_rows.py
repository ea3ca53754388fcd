"""`SamplingRows`: the sampling parameters of the rows of the batch, as arrays that live as long as the rows.

A row that only needs temperature, top_k, top_p, min_p and a seed is a handful of numbers. Rows that change
logits (biases, bad ids, min_tokens, penalties) also have an entry in `_edits`: others pay nothing for it.
"""

from collections.abc import Collection, Sequence

import numpy as np

from configs.sampling import SamplingParams


class LogitEdits:
    """What one row does to its logits before they become a distribution.

    The penalties keep the distinct token ids of the row with their counts in the output, so that a step
    costs as much as there are distinct tokens, not as much as there are words in the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Collection[int],
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray,
    ) -> None:
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.bad_ids = np.array(params.bad_token_ids, np.int64)
        self.stop_ids = np.array(sorted(stop_token_ids), np.int64)
        self.min_tokens = params.min_tokens
        self.num_output_tokens = 0
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.repetition = params.repetition_penalty
        self.has_penalties = bool(self.presence or self.frequency or self.repetition != 1.0)
        self._position: dict[int, int] = {}  # token id -> index into _token_ids and _counts
        self._token_ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        if self.has_penalties and self.repetition != 1.0:  # the others count the output alone
            for token_id in np.unique(prompt_token_ids).tolist():
                self._index_of(token_id)
        for token_id in output_token_ids.tolist():
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """The row's output grew by one token."""
        self.num_output_tokens += 1
        if self.has_penalties:
            index = self._index_of(token_id)  # may replace _counts by a longer one
            self._counts[index] += 1

    def _index_of(self, token_id: int) -> int:
        index = self._position.setdefault(token_id, len(self._position))
        if index == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[index] = token_id
        return index

    @property
    def banned_ids(self) -> np.ndarray:
        """int64: ids that cannot be chosen now."""
        if self.num_output_tokens < self.min_tokens:
            return np.concatenate([self.bad_ids, self.stop_ids])
        return self.bad_ids

    @property
    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids of the row (int64) and how often each is in the output (float32)."""
        return self._token_ids[: len(self._position)], self._counts[: len(self._position)]


class SamplingRows:
    """Parameters of up to `max_num_seqs` rows; each array is indexed by row."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        """0 keeps all."""
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.num_output_tokens = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        """-1: none are wanted."""
        self._edits: dict[int, LogitEdits] = {}

    def put(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        stop_token_ids: Collection[int],
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray,
    ) -> None:
        """Fill `row` for a request that starts, or comes back after a preemption with the output it had."""
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self.num_output_tokens[row] = len(output_token_ids)
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        edits = LogitEdits(params, stop_token_ids, prompt_token_ids, output_token_ids)
        holds_off_stops = params.min_tokens > 0 and len(edits.stop_ids) > 0
        if edits.has_penalties or params.logit_bias or params.bad_token_ids or holds_off_stops:
            self._edits[row] = edits

    def clear(self, row: int) -> None:
        self._edits.pop(row, None)

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """The outputs of `rows` grew by one token each."""
        self.num_output_tokens[rows] += np.uint64(1)
        if self._edits:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if edits := self._edits.get(row):
                    edits.append(token_id)

    def edits(self, rows: Sequence[int]) -> list[tuple[int, LogitEdits]]:
        """(index into `rows`, its edits) for the rows that change their logits."""
        if not self._edits:
            return []
        return [(index, self._edits[row]) for index, row in enumerate(rows) if row in self._edits]
