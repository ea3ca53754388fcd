"""Weights of 8 or 4 bits, as every implementation of `Ops` takes them."""

from dataclasses import dataclass

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
