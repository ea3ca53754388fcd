"""Log-probabilities of the raw model distribution, for the rows that ask for them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .messages import TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for -inf, which JSON cannot say."""


class RawLogprobs:
    """Taken from the logits before the sampler changes them; asked for entries once the tokens are chosen."""

    def __init__(
        self, logits: Tensor, num_logprobs: np.ndarray, wanted_ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        """logits: float32 [rows, vocab]; num_logprobs: int64 [rows], -1 for rows that want none; `wanted_ids` of
        each row come behind its likeliest."""
        self._wanted_ids = wanted_ids
        self._rows = np.flatnonzero(num_logprobs >= 0)
        self._counts = num_logprobs[self._rows].tolist()
        if self._counts:
            index = torch.from_numpy(self._rows).to(logits.device)
            self._logprobs = logits[index].log_softmax(-1).clamp_(min=LOWEST_LOGPROB)
            self._top = self._logprobs.topk(min(max(self._counts), logits.shape[1]))

    def entries(self, token_ids: np.ndarray) -> list[TokenLogprobs | None]:
        """One per row, for the tokens chosen there (int64 [rows]); empty when no row asked."""
        if not self._counts:
            return []
        chosen = self._logprobs.gather(1, torch.from_numpy(token_ids[self._rows, None]).to(self._logprobs.device))
        logprobs: list[float] = chosen[:, 0].tolist()
        ranks: list[int] = (self._logprobs > chosen).sum(1).add(1).tolist()
        ids: list[list[int]] = self._top.indices.tolist()
        values: list[list[float]] = self._top.values.tolist()
        entries: list[TokenLogprobs | None] = [None] * len(token_ids)
        for index, (row, count) in enumerate(zip(self._rows.tolist(), self._counts, strict=True)):
            top = list(zip(ids[index][:count], values[index][:count], strict=True))
            if self._wanted_ids is not None:
                wanted = list(self._wanted_ids[row])
                top += zip(wanted, self._logprobs[index, wanted].tolist(), strict=True)
            entries[row] = TokenLogprobs(int(token_ids[row]), logprobs[index], top, ranks[index])
        return entries
