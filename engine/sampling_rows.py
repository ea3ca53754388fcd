"""`SamplingRows`: the sampling parameters of the rows of the batch, as arrays that live as long as the rows.

A row that only needs temperature, top_k, top_p, min_p and a seed is a handful of numbers. Rows that change
logits (biases, bad ids, min_tokens) also have an entry in `_edits`: others pay nothing for it.

When a token is chosen, the device knows it first (`advance`) and the host later (`append`); between the two the row's
next token may be chosen already. So whatever a choice depends on moves with `advance`, but for the edits that look at
the output's tokens and the languages, whose rows have to wait for `append`.
"""

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from configs.sampling import SamplingParams

from .kernels.ops import Penalties
from .kernels.penalties import SparsePenalties
from .structured.language import Language, Matcher
from .thinking import Thinking


class LogitEdits:
    """What one row does to its logits before they become a distribution, but for its penalties and its language."""

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Collection[int],
        output_token_ids: np.ndarray,
    ) -> None:
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self._allowed_ids = np.array(params.allowed_token_ids, np.int64)
        self._thinking = None if params.thinking is None else Thinking(params.thinking)
        bad_ids = list(params.bad_token_ids)
        self._last_ids: dict[tuple[int, ...], list[int]] = {}  # by the ids before them in a bad sequence
        for *before, last in params.bad_sequences:
            (self._last_ids.setdefault(tuple(before), []) if before else bad_ids).append(last)
        self.bad_ids = np.array(bad_ids, np.int64)
        self._newest: deque[int] = deque(maxlen=max((len(ids) for ids in self._last_ids), default=0))  # output tokens
        self.stop_ids = np.array(sorted(stop_token_ids), np.int64)
        self.min_tokens = params.min_tokens
        for token_id in output_token_ids.tolist():
            self.append(token_id)
        self.is_empty = not (
            self._thinking
            or any(len(ids) for ids in (self.bias_ids, self._allowed_ids, self.bad_ids, self._last_ids))
            or (self.min_tokens > 0 and len(self.stop_ids) > 0)
        )

    def append(self, token_id: int) -> None:
        """The row's output grew by one token."""
        self._newest.append(token_id)
        if self._thinking is not None:
            self._thinking.append(token_id)

    @property
    def allowed_ids(self) -> np.ndarray:
        """int64: the only ids that can be chosen now; empty for all."""
        forced_id = None if self._thinking is None else self._thinking.forced_id
        return self._allowed_ids if forced_id is None else np.array([forced_id], np.int64)

    def banned_ids(self, num_output_tokens: int) -> np.ndarray:
        """int64: ids that cannot be chosen now. `num_output_tokens` may count one that `append` has not seen."""
        banned = [self.bad_ids]
        if num_output_tokens < self.min_tokens:
            banned.append(self.stop_ids)
        if self._last_ids:
            newest = tuple(self._newest)
            lasts = (self._last_ids.get(newest[-length:], ()) for length in {*map(len, self._last_ids)})
            banned.append(np.array([token_id for ids in lasts for token_id in ids], np.int64))
        return np.concatenate(banned)


class SamplingRows:
    """Parameters of up to `max_num_seqs` rows; each array is indexed by row."""

    def __init__(self, max_num_seqs: int, penalties: Penalties | None = None) -> None:
        """`penalties` are those of the machine's operations."""
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        """0 keeps all."""
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.num_output_tokens = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        """-1: none are wanted."""
        self.logprob_ids: dict[int, tuple[int, ...]] = {}
        """By row: ids whose logprobs come behind the likeliest."""
        self.matchers: dict[int, Matcher] = {}
        """By row: of those whose output has a language."""
        self.penalties = penalties or SparsePenalties()
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
        language: Language | None = None,
    ) -> None:
        """Fill `row` for a request that starts, or comes back after a preemption with the output it had."""
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self.num_output_tokens[row] = len(output_token_ids)
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.penalties.put(row, params, prompt_token_ids, output_token_ids)
        edits = LogitEdits(params, stop_token_ids, output_token_ids)
        if not edits.is_empty:
            self._edits[row] = edits
        if params.logprobs is not None and params.logprob_token_ids:
            self.logprob_ids[row] = params.logprob_token_ids
        if language is not None:
            self.matchers[row] = Matcher(language, stop_token_ids, output_token_ids.tolist())

    def clear(self, row: int) -> None:
        for table in (self._edits, self.logprob_ids, self.matchers):
            table.pop(row, None)
        self.penalties.clear(row)

    def advance(self, rows: np.ndarray, token_ids: Tensor) -> None:
        """The device chose one token more for each of `rows`: int64 [rows], which the host may not know yet."""
        self.num_output_tokens[rows] += np.uint64(1)
        self.penalties.append(rows, token_ids)

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """The host knows what was chosen for `rows`."""
        if self._edits or self.matchers:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                for each in (self._edits.get(row), self.matchers.get(row)):
                    if each is not None:
                        each.append(token_id)

    def edits(self, rows: Sequence[int]) -> list[tuple[int, LogitEdits]]:
        """(index into `rows`, its edits) for the rows that change their logits."""
        if not self._edits:
            return []
        return [(index, self._edits[row]) for index, row in enumerate(rows) if row in self._edits]

    def matchers_of(self, rows: Sequence[int]) -> list[tuple[int, Matcher]]:
        """(index into `rows`, its matcher) for the rows whose output has a language."""
        if not self.matchers:
            return []
        return [(index, self.matchers[row]) for index, row in enumerate(rows) if row in self.matchers]
