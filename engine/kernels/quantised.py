"""Weights of few bits, as every implementation of `Ops` takes them."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Columns that share a scale and a minimum."""


@dataclass(frozen=True)
class QuantisedWeight:
    """value = scale * q + minimum, in groups of 32 columns."""

    bits: int
    """4 or 8."""
    q: Tensor  # uint8 [rows, columns], below 2 ** bits
    scale: Tensor  # float16 [rows, columns / 32]
    minimum: Tensor  # float16 [rows, columns / 32]

    def dequantise(self) -> Tensor:
        """float32 [rows, columns]"""
        groups = self.q.unflatten(1, (-1, GROUP_SIZE)).float()
        return torch.addcmul(self.minimum.float()[..., None], groups, self.scale.float()[..., None]).flatten(1)


FLOAT8_GREATEST = 448.0
"""Of e4m3."""

FLOAT8_AT_ONCE = 2**24
"""Elements rounded at a time, to have float32 copies of so many only."""


@dataclass(frozen=True)
class Float8Weight:
    """value = scale of the row * number."""

    numbers: Tensor  # float8_e4m3fn [rows, columns]
    scale: Tensor  # float32 [rows]

    @classmethod
    def round(cls, weight: Tensor) -> Self:
        """To the nearest; the greatest magnitude of a row becomes e4m3's greatest number. weight [rows, columns]"""
        numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        scale = weight.new_empty(len(weight), dtype=torch.float32)
        step = max(1, FLOAT8_AT_ONCE // weight.shape[1])
        for begin in range(0, len(weight), step):
            rows = slice(begin, begin + step)
            part = weight[rows].float()
            scale[rows] = part.abs().amax(1) / FLOAT8_GREATEST
            divisor = torch.where(scale[rows] == 0, 1, scale[rows])[:, None]
            numbers[rows] = (part / divisor).to(torch.float8_e4m3fn)
        return cls(numbers, scale)

    def dequantise(self) -> Tensor:
        """float32 [rows, columns]"""
        return self.numbers.float() * self.scale[:, None]
