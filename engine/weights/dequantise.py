"""Stored bytes -> float tensors."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.checkpoints import StoredTensor

from .gguf_blocks import BLOCK_BYTES, Bytes, Floats, unpack

FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ELEMENTS_AT_ONCE = 32768
"""Converted at a time: the intermediate arrays stay in the second-level cache, and torch starts no threads for them."""


def read_into(out: Tensor, stored: StoredTensor) -> None:
    """Fill `out`, of the shape of `stored` and any float type and device."""
    if stored.dtype in FLOAT_TYPES:
        out.copy_(torch.from_numpy(stored.data).view(FLOAT_TYPES[stored.dtype]).view(out.shape))
        return
    for rows, data in chunks(stored, ELEMENTS_AT_ONCE):
        out.flatten(0, -2)[rows].copy_(torch.from_numpy(dequantise(data, stored.dtype)))


def chunks(stored: StoredTensor, num_elements: int) -> Iterator[tuple[slice, Bytes]]:
    """Rows of about `num_elements`, all but the last dimension counted as one, and their bytes [rows, bytes]."""
    data = stored.data.reshape(math.prod(stored.shape[:-1]), -1)
    step = max(1, num_elements // stored.shape[-1])
    for start in range(0, len(data), step):
        rows = slice(start, start + step)
        yield rows, data[rows]


def dequantise(rows: Bytes, kind: str) -> Floats:
    """[rows, bytes] of a stored type -> [rows, elements]"""
    if kind in BLOCK_BYTES:
        return unpack(rows, kind).dequantise().reshape(len(rows), -1)
    if kind == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind in FLOAT_TYPES:
        return rows.view(f"f{FLOAT_TYPES[kind].itemsize}").astype(np.float32)
    import gguf.quants  # takes 0.2 s to import, which the common types need not pay

    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
