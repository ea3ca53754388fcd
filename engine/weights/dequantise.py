"""Stored bytes -> float tensors."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.checkpoints import StoredTensor

FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

CHUNK_ELEMENTS = 32768
"""Dequantised at a time: the intermediate arrays stay in the second-level cache."""


def read_into(out: Tensor, stored: StoredTensor) -> None:
    """Fill `out`, of the shape of `stored` and any float type and device."""
    if stored.dtype in FLOAT_TYPES:
        out.copy_(torch.from_numpy(stored.data).view(FLOAT_TYPES[stored.dtype]).view(out.shape))
        return
    data = stored.data.reshape(math.prod(stored.shape[:-1]), -1)
    rows = max(1, CHUNK_ELEMENTS // stored.shape[-1])
    for start in range(0, len(data), rows):
        values = _dequantise(data[start : start + rows], stored.dtype)
        out.flatten(0, -2)[start : start + rows].copy_(torch.from_numpy(values))


def _dequantise(rows: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """[rows, bytes] -> [rows, elements]"""
    if kind in ("Q4_0", "Q4_1", "Q8_0"):
        return _dequantise_groups(rows, kind).reshape(len(rows), -1)
    import gguf.quants  # takes 0.2 s to import, which the common types need not pay

    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


def _dequantise_groups(rows: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """Groups of 32 elements, value = scale * q + minimum: [groups, 32].

    Q8_0: | f16 scale | 32 x i8 q |        Q4_0: | f16 scale | 16 bytes |, minimum = -8 * scale
    Q4_1: | f16 scale | f16 minimum | 16 bytes |        a byte holds q[i] (low half) and q[i + 16]
    """
    groups = rows.reshape(-1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind])
    scale = groups[:, 0:2].copy().view(np.float16).astype(np.float32)  # [groups, 1]
    if kind == "Q8_0":
        return groups[:, 2:].view(np.int8) * scale
    minimum = groups[:, 2:4].copy().view(np.float16).astype(np.float32) if kind == "Q4_1" else -8 * scale
    packed = groups[:, -16:]
    out = np.empty((len(groups), 32), np.float32)
    out[:, :16], out[:, 16:] = packed & 15, packed >> 4
    out *= scale
    out += minimum
    return out
