"""Log-probabilities of the raw model distribution, for the rows that ask for them."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from .messages import TokenLogprobs
from .transfer import upload

LOWEST_LOGPROB = -9999.0
"""Stands for -inf, which JSON cannot say."""


class RawLogprobs:
    """Taken from the logits before the sampler changes them; asked for entries once the tokens are chosen."""

    def __init__(
        self, logits: Tensor, num_logprobs: np.ndarray, wanted_ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        """logits: float32 [rows, vocab]; num_logprobs: int64 [rows], -1 for rows that want none; `wanted_ids` of
        each row come behind its likeliest."""
        self._rows = np.flatnonzero(num_logprobs >= 0)
        self._counts = num_logprobs[self._rows].tolist()
        self._wanted_ids = [() if wanted_ids is None else wanted_ids[row] for row in self._rows.tolist()]
        if self._counts:
            self._index, wanted = upload((self._rows, self._wanted_matrix()), logits.device)
            asking = logits if len(self._rows) == len(logits) else logits[self._index]
            self._logprobs = asking.log_softmax(-1)
            self._top = self._logprobs.topk(min(max(self._counts), logits.shape[1]))
            self._wanted = self._logprobs.gather(1, wanted)

    def of(self, token_ids: Tensor) -> dict[str, Tensor]:
        """What `entries` needs on the host about the tokens chosen there, int64 [rows]; empty when no row asked."""
        if not self._counts:
            return {}
        chosen = self._logprobs.gather(1, token_ids[self._index, None])
        return {
            "rank": (self._logprobs > chosen).sum(1).add(1),
            "chosen": chosen[:, 0].clamp(min=LOWEST_LOGPROB),
            "top_ids": self._top.indices,
            "top": self._top.values.clamp(min=LOWEST_LOGPROB),
            "wanted": self._wanted.clamp(min=LOWEST_LOGPROB),
        }

    def entries(self, host: Mapping[str, np.ndarray]) -> list[TokenLogprobs | None]:
        """One per row; empty when no row asked. `host`: arrays of what `of` gave, and the token ids, int64 [rows]."""
        if not self._counts:
            return []
        token_ids: list[int] = host["token_ids"].tolist()
        chosen, ranks, ids, values, wanted = (
            host[name].tolist() for name in ("chosen", "rank", "top_ids", "top", "wanted")
        )
        entries: list[TokenLogprobs | None] = [None] * len(token_ids)
        for index, (row, count) in enumerate(zip(self._rows.tolist(), self._counts, strict=True)):
            top = list(zip(ids[index][:count], values[index][:count], strict=True))
            top += zip(self._wanted_ids[index], wanted[index], strict=False)
            entries[row] = TokenLogprobs(token_ids[row], chosen[index], top, ranks[index])
        return entries

    def _wanted_matrix(self) -> np.ndarray:
        """int64 [rows that ask, most wanted ids], filled up with 0."""
        matrix = np.zeros((len(self._rows), max(map(len, self._wanted_ids))), np.int64)
        for row, ids in zip(matrix, self._wanted_ids, strict=True):
            row[: len(ids)] = ids
        return matrix
