"""Step 3 of engine/sampler.py in plain torch, for machines on which the host knows every token at once."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.sampling import SamplingParams
from engine.transfer import upload


class PenaltyFactors(NamedTuple):
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, params: SamplingParams) -> "PenaltyFactors":
        return cls(params.repetition_penalty, params.frequency_penalty, params.presence_penalty)

    @property
    def change_something(self) -> bool:
        return self != (1.0, 0.0, 0.0)


class SparsePenalties:
    """See `Penalties`. A step costs as much as its rows have distinct tokens, not as there are words in the vocabulary.

    On a GPU `append` waits for the tokens.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _CountedIds] = {}

    def put(self, row: int, params: SamplingParams, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        factors = PenaltyFactors.of(params)
        if factors.change_something:
            self._rows[row] = _CountedIds(factors, prompt_ids, output_ids)

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)

    def append(self, rows: np.ndarray, token_ids: Tensor) -> None:
        if self._rows:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in self._rows:
                    self._rows[row].append(token_id)

    def apply(self, logits: Tensor, rows: np.ndarray) -> None:
        counted = [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
        if not counted:
            return
        lengths = [len(each.ids) for _, each in counted]
        factors = np.array([each.factors for _, each in counted], np.float32)
        row, token, count, per_token = upload(
            (
                np.repeat([index for index, _ in counted], lengths),
                np.concatenate([each.ids for _, each in counted]),
                np.concatenate([each.counts for _, each in counted]),
                np.repeat(factors, lengths, axis=0),
            ),
            logits.device,
        )
        repetition, frequency, presence = per_token.unbind(1)
        values = logits[row, token]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[row, token] = values - frequency * count - presence * (count > 0)


class _CountedIds:
    """Distinct token ids of one row, with their counts in the output."""

    def __init__(self, factors: PenaltyFactors, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        self.factors = factors
        self._position: dict[int, int] = {}  # token id -> index into _ids and _counts
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        if factors.repetition != 1.0:  # the others count the output alone
            for token_id in np.unique(prompt_ids).tolist():
                self._index_of(token_id)
        for token_id in output_ids.tolist():
            self.append(token_id)

    def append(self, token_id: int) -> None:
        index = self._index_of(token_id)  # may replace _counts by a longer one
        self._counts[index] += 1

    def _index_of(self, token_id: int) -> int:
        index = self._position.setdefault(token_id, len(self._position))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        return index

    @property
    def ids(self) -> np.ndarray:
        """int64"""
        return self._ids[: len(self._position)]

    @property
    def counts(self) -> np.ndarray:
        """float32, of `ids`."""
        return self._counts[: len(self._position)]
