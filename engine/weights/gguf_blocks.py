"""GGUF's quantised blocks as groups: value = scale * q + minimum.

Layouts: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h. d and m are float16, and a byte of
`qs` holds one element in its low and one in its high half:

    Q8_0: d, 32 x i8            32 elements     Q4_K: d, m, scales[12], qs[128]             256 elements
    Q4_0: d, qs[16]             32              Q5_K: d, m, scales[12], qh[32], qs[128]     256
    Q4_1: d, m, qs[16]          32              Q6_K: qs[128], qh[64], 16 x i8 scale, d     256
    Q5_0: d, qh[4], qs[16]      32
    Q5_1: d, m, qh[4], qs[16]   32
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


class Groups(NamedTuple):
    """Neighbours in a row that share a scale and a minimum."""

    q: Bytes  # [groups, elements]
    scale: Floats  # [groups, 1]
    minimum: Floats  # [groups, 1]

    def dequantise(self) -> Floats:
        """[groups, elements]"""
        out = self.q.astype(np.float32)
        out *= self.scale
        out += self.minimum
        return out


def unpack(data: Bytes, kind: str) -> Groups:
    """Groups of 32 elements, of 16 for Q6_K, without loss; `data` holds whole blocks."""
    blocks = data.reshape(-1, BLOCK_BYTES[kind])
    if kind == "Q6_K":
        return _unpack_q6_k(blocks)
    if kind in ("Q4_K", "Q5_K"):
        return _unpack_k(blocks, has_fifth_bit=kind == "Q5_K")
    scale = _halves(blocks[:, :2])
    if kind == "Q8_0":
        return Groups(blocks[:, 2:] ^ np.uint8(128), scale, scale * -128)  # signed + 128
    q = np.concatenate((blocks[:, -16:] & 15, blocks[:, -16:] >> 4), axis=1)
    if kind in ("Q5_0", "Q5_1"):
        q |= np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little") << 4
    minimum = _halves(blocks[:, 2:4]) if kind.endswith("1") else scale * (-8 if kind == "Q4_0" else -16)
    return Groups(q, scale, minimum)


def merge_pairs(groups: Groups) -> Groups:
    """Q6_K's groups of 16 as groups of 32, with q of 8 bits.

    The step is a quarter of the larger scale, so the half that owns it keeps its values; the other half is rounded, by
    an eighth of that scale at most, or a quarter where a half of the opposite scale reaches its end. For normally
    distributed weights that is 0.4 % of their root mean square; Q6_K itself has rounded them by 1.9 %.
    """
    scale = groups.scale.reshape(-1, 2)
    larger = np.where(np.abs(scale[:, :1]) >= np.abs(scale[:, 1:]), scale[:, :1], scale[:, 1:])
    step = (larger / 4).astype(np.float16).astype(np.float32)  # as it will be kept
    q = groups.dequantise().reshape(-1, 32)
    q *= np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    q += 128
    return Groups(np.rint(q).clip(0, 255).astype(np.uint8), step, step * -128)


def _unpack_k(blocks: Bytes, *, has_fifth_bit: bool) -> Groups:
    """Eight groups per block; each has a scale and a minimum of six bits, in units of d and -m."""
    packed = blocks[:, 4:16]
    low, high, both = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate((low & 63, both & 15 | low >> 6 << 4), axis=1)
    minimum = np.concatenate((high & 63, both >> 4 | high >> 6 << 4), axis=1)
    qs = blocks[:, -128:].reshape(-1, 4, 1, 32)
    q = np.concatenate((qs & 15, qs >> 4), axis=2).reshape(-1, 8, 32)
    if has_fifth_bit:
        bit = np.arange(8, dtype=np.uint8)[:, None]
        q |= (blocks[:, None, 16:48] >> bit & 1) << 4
    return Groups(
        q.reshape(-1, 32),
        (_halves(blocks[:, :2]) * scale).reshape(-1, 1),
        (_halves(blocks[:, 2:4]) * minimum).reshape(-1, 1) * -1,
    )


def _unpack_q6_k(blocks: Bytes) -> Groups:
    """In each half of a block `qs` holds four bits of elements 0-63 and 64-127, `qh` two of every thirty-second."""
    qs, qh = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    q = np.concatenate((qs & 15, qs >> 4), axis=2).reshape(-1, 2, 4, 32)
    q |= (qh >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) << 4
    scale = (_halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8)).reshape(-1, 1)
    return Groups(q.reshape(-1, 16), scale, scale * -32)


def _halves(data: Bytes) -> Floats:
    """float16 in two columns of bytes -> [blocks, 1]"""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)
