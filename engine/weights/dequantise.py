"""Stored bytes -> float tensors."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.checkpoints import StoredTensor

from .gguf_blocks import BLOCK_BYTES, Bytes, Floats, unpack
from .staging import IN_PLACE, Placement

FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

FLOAT8_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""Of each byte of F8_E4M3."""

ELEMENTS_AT_ONCE = 32768
"""Converted at a time: the intermediate arrays stay in the second-level cache, and torch starts no threads for them."""


def read_into(out: Tensor, stored: StoredTensor, placement: Placement = IN_PLACE) -> None:
    """Fill `out`, contiguous, of the shape of `stored` and any float type, on the device of `placement`."""
    table = out.view(-1, stored.shape[-1])
    dtype = FLOAT_TYPES.get(stored.dtype, torch.float32)
    for piece, (host,) in placement.pieces((table, dtype)):
        if stored.dtype not in FLOAT_TYPES:
            for own, rows in chunks(stored, piece, ELEMENTS_AT_ONCE):
                host[own].copy_(torch.from_numpy(dequantise(stored, rows)))
        elif host.dtype == dtype:  # torch's copy would start threads in each of ours
            host.view(torch.uint8).numpy()[:] = stored_rows(stored, piece)
        else:
            host.copy_(torch.from_numpy(stored_rows(stored, piece)).view(dtype))


def stored_rows(stored: StoredTensor, rows: slice) -> Bytes:
    """[rows, bytes], in the order of the network; all but the last dimension are counted as one."""
    data, num_rows = stored_bytes(stored), math.prod(stored.shape[:-1])
    if stored.is_transposed:
        by_column = data.reshape(stored.shape[1], num_rows, -1)[
            :, rows if stored.row_order is None else stored.row_order[rows]
        ]
        return np.ascontiguousarray(by_column.swapaxes(0, 1)).reshape(by_column.shape[1], -1)
    if stored.row_order is None:
        return data.reshape(num_rows, -1)[rows]
    by_order = data.reshape(len(stored.row_order), -1)
    if num_rows == 1:
        return by_order[stored.row_order].reshape(1, -1)[rows]
    return by_order[stored.row_order[rows]]


def stored_bytes(stored: StoredTensor) -> Bytes:
    """Flat, in the file's order."""
    assert stored.read is not None, stored.name
    data = stored.read()
    return data.reshape(-1).view(torch.uint8).numpy() if isinstance(data, Tensor) else data


def chunks(stored: StoredTensor, piece: slice, num_elements: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a piece of rows, of about `num_elements`: their place in the piece, and in `stored`."""
    step = max(1, num_elements // stored.shape[-1])
    for start in range(piece.start, piece.stop, step):
        stop = min(start + step, piece.stop)
        yield slice(start - piece.start, stop - piece.start), slice(start, stop)


def dequantise(stored: StoredTensor, rows: slice) -> Floats:
    """[rows, elements]"""
    data, kind = stored_rows(stored, rows), stored.dtype
    if kind in BLOCK_BYTES:
        return unpack(data, kind).dequantise().reshape(len(data), -1)
    if kind == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind == "F8_E4M3":
        return FLOAT8_NUMBERS[data] * _scale(stored, rows)
    if kind in FLOAT_TYPES:
        return data.view(f"f{FLOAT_TYPES[kind].itemsize}").astype(np.float32)
    import gguf.quants  # takes 0.2 s to import, which the common types need not pay

    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])


def _scale(stored: StoredTensor, rows: slice) -> Floats:
    """[rows, columns or 1]"""
    assert stored.scale is not None, stored.name
    num_rows, num_columns = stored.scale.block
    first = rows.start // num_rows
    blocks = dequantise(stored.scale.tensor, slice(first, (rows.stop - 1) // num_rows + 1))
    scale = blocks[np.arange(rows.start, rows.stop) // num_rows - first]
    return scale if scale.shape[1] == 1 else scale.repeat(num_columns, axis=1)[:, : stored.shape[1]]
