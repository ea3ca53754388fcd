"""Linear layers with weights of 8 or 4 bits, which stay packed in the GPU's memory.

    codes   the columns of a row of 8 bits, a byte each:         0     1     ...  31    32    ...
            of 4 bits, low and high half of a byte:              0|16  1|17  ...  15|31 32|48 ...
    steps   one of each group of 32 columns: scale and minimum, float16 in the low and the high half of 32 bits; where
            every minimum is -scale * 2 ** (bits - 1), the scale alone

Few rows of activations: each program multiplies a tile of weights, dequantised in registers, by all of them, so that
the time is that of reading the packed weights. Many rows: tiles are dequantised to memory and multiplied by torch.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.quantised import GROUP_SIZE, QuantisedWeight

from .language import dot

FEW_ROWS = 64
"""Of activations, at most: with more the weights are dequantised to memory."""

BLOCK_N = 64
"""Rows of weights in a tile."""
BLOCK_GROUPS = {8: 4, 4: 8}
"""Bits -> groups of a tile: 128 bytes of each row."""
NUM_WARPS, NUM_STAGES = 4, {16: 4, 32: 3, 64: 2}
"""Stages by the rows of x in a tile."""

SUM_BLOCK = 256
"""Elements of a row whose splits a program adds."""

WANTED_PROGRAMS = 512
"""Splits make so many where the weight has few rows: several for each multiprocessor. It does not depend on the GPU or
the batch, so that sums are the same everywhere."""
MIN_BLOCKS_PER_SPLIT = 4

DEQUANTISED_AT_ONCE = 2**24
"""Elements: the second-level cache holds them until they are multiplied."""


class PackedWeight(NamedTuple):
    codes: Tensor  # uint8 [rows, bytes]
    steps: Tensor  # int32 [rows, groups], or float16 where it is symmetric
    bits: int

    @classmethod
    def pack(cls, weight: QuantisedWeight) -> Self:
        """On the device of `weight`."""
        codes = weight.q
        if weight.bits == 4:
            low, high = codes.unflatten(1, (-1, 2, GROUP_SIZE // 2)).unbind(2)
            codes = (low | high << 4).flatten(1)
        if torch.equal(weight.minimum, weight.scale * -(2 ** (weight.bits - 1))):
            return cls(codes.contiguous(), weight.scale.contiguous(), weight.bits)
        both = torch.stack((weight.scale, weight.minimum), dim=-1)
        return cls(codes.contiguous(), both.view(torch.int32).squeeze(-1), weight.bits)

    @property
    def is_symmetric(self) -> bool:
        return self.steps.dtype == torch.float16

    def dequantise(self, begin: int, end: int, out: Tensor) -> None:
        """Rows from `begin` to `end` into `out` [end - begin, columns]."""
        groups = self.steps.shape[1]
        grid = (triton.cdiv(end - begin, 16), triton.cdiv(groups, BLOCK_GROUPS[self.bits]))
        _dequantise[grid](
            *(self.codes[begin:end], self.steps[begin:end], out, end - begin, groups),
            BITS=self.bits,
            SYMMETRIC=self.is_symmetric,
            BLOCK_N=16,
            GROUPS=BLOCK_GROUPS[self.bits],
        )


class QuantisedLinear(NamedTuple):
    weight: PackedWeight
    bias: Tensor | None  # [rows]

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows] of the type of x, or of `dtype`."""
        linear = few_rows_linear if len(x) <= FEW_ROWS else many_rows_linear
        return linear(x, *self, dtype or x.dtype)


def few_rows_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A row of the result does not depend on the other rows of x."""
    (num_tokens, _), (rows, groups) = x.shape, weight.steps.shape
    splits, blocks_per_split = split(rows, groups, weight.bits)
    out = x.new_empty(num_tokens, rows, dtype=dtype)
    is_whole = splits == 1
    partial = out if is_whole else x.new_empty(splits, num_tokens, rows, dtype=torch.float32)
    block_m = max(16, triton.next_power_of_2(num_tokens))
    _multiply[triton.cdiv(rows, BLOCK_N), splits](
        *(x.contiguous(), weight.codes, weight.steps, bias if is_whole else None, partial),
        *(num_tokens, rows, groups, blocks_per_split),
        BITS=weight.bits,
        SYMMETRIC=weight.is_symmetric,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        GROUPS=BLOCK_GROUPS[weight.bits],
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES[block_m],
    )
    if not is_whole:
        grid = (num_tokens, triton.cdiv(rows, SUM_BLOCK))
        _add_splits[grid](partial, bias, out, num_tokens, rows, SPLITS=splits, BLOCK=SUM_BLOCK)
    return out


def split(rows: int, groups: int, bits: int) -> tuple[int, int]:
    """Parts of the columns whose sums are made apart, and blocks of columns in each: by the weight's shape alone."""
    blocks = triton.cdiv(groups, BLOCK_GROUPS[bits])
    wanted = triton.cdiv(WANTED_PROGRAMS, triton.cdiv(rows, BLOCK_N))
    blocks_per_split = max(triton.cdiv(blocks, wanted), MIN_BLOCKS_PER_SPLIT)
    return triton.cdiv(blocks, blocks_per_split), blocks_per_split


def many_rows_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    rows, columns = weight.codes.shape[0], x.shape[1]
    step = max(1, DEQUANTISED_AT_ONCE // columns)
    out = x.new_empty(len(x), rows, dtype=dtype)
    tile = x.new_empty(min(step, rows), columns)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        weight.dequantise(begin, end, tile)
        factors, place = (x, tile[: end - begin].t()), out[:, begin:end]
        if bias is not None:
            place.copy_(torch.addmm(bias[begin:end], *factors))
        elif dtype == x.dtype:
            torch.mm(*factors, out=place)
        else:
            place.copy_(torch.mm(*factors, out_dtype=dtype) if x.is_cuda else torch.mm(*factors))
    return out


@triton.jit
def _steps(words, half: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Scale and minimum of groups, float32; codes are from 0 to 2 * half - 1."""
    if SYMMETRIC:
        scale = words.to(tl.float32)
        minimum = scale * -half
    else:
        scale = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def _values(q, scale, minimum, dtype: tl.constexpr):
    """q [n, groups, elements of a group], scale and minimum [n, groups] -> [n, groups * elements]"""
    values = scale[:, :, None] * q.to(tl.float32) + minimum[:, :, None]
    return tl.reshape(values.to(dtype), (q.shape[0], q.shape[1] * q.shape[2]))


@triton.jit(do_not_specialize=["num_tokens", "groups", "blocks_per_split"])
def _multiply(
    x,  # [num_tokens, columns]
    codes,
    steps,
    bias,  # [rows] or None
    out,  # [splits, num_tokens, rows]
    num_tokens,
    rows,
    groups,
    blocks_per_split,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A program: BLOCK_N rows of weights by all of x, in one of the splits of the columns."""
    BYTES: tl.constexpr = 4 * BITS  # of a group
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    byte = tl.arange(0, BYTES)
    column = tl.arange(0, GROUPS * BYTES)  # of x, beside the low halves where there are two
    column = column // BYTES * 32 + column % BYTES
    first = tl.program_id(1) * blocks_per_split * GROUPS
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    row = tl.minimum(n, rows - 1).to(tl.int64) * groups
    for block in range(blocks_per_split):
        start = first + block * GROUPS
        group = start + tl.arange(0, GROUPS)
        at = row[:, None] + group[None, :]
        is_inside = group < groups
        q = tl.load(codes + at[:, :, None] * BYTES + byte[None, None, :], mask=is_inside[None, :, None], other=0)
        words = tl.load(steps + at, mask=is_inside[None, :], other=0)
        scale, minimum = _steps(words, 2 ** (BITS - 1), SYMMETRIC)
        k = start * 32 + column
        x_at = x + m[None, :] * (groups * 32) + k[:, None]
        x_mask = (m < num_tokens)[None, :] & (k < groups * 32)[:, None]
        if BITS == 8:
            acc = dot(_values(q, scale, minimum, x.dtype.element_ty), tl.load(x_at, mask=x_mask, other=0.0), acc)
        else:
            low = _values(q & 15, scale, minimum, x.dtype.element_ty)
            high = _values(q >> 4, scale, minimum, x.dtype.element_ty)
            acc = dot(low, tl.load(x_at, mask=x_mask, other=0.0), acc)
            acc = dot(high, tl.load(x_at + 16, mask=x_mask, other=0.0), acc)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    out_at = (tl.program_id(1).to(tl.int64) * num_tokens + m[None, :]) * rows + n[:, None]
    tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=(n < rows)[:, None] & (m < num_tokens)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _add_splits(partial, bias, out, num_tokens, rows, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """partial [SPLITS, num_tokens, rows] -> out [num_tokens, rows]"""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < rows
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(SPLITS):
        total += tl.load(partial + (index * num_tokens + token) * rows + n, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * rows + n, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "groups"])
def _dequantise(
    codes,
    steps,
    out,  # [rows, columns]
    rows,
    groups,
    BITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    BYTES: tl.constexpr = 4 * BITS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    byte = tl.arange(0, BYTES)
    at = n.to(tl.int64)[:, None] * groups + group[None, :]
    mask = (n < rows)[:, None] & (group < groups)[None, :]
    q = tl.load(codes + at[:, :, None] * BYTES + byte[None, None, :], mask=mask[:, :, None], other=0)
    scale, minimum = _steps(tl.load(steps + at, mask=mask, other=0), 2 ** (BITS - 1), SYMMETRIC)
    out_at = out + at[:, :, None] * 32 + byte[None, None, :]
    for half in tl.static_range(8 // BITS):
        part = (q >> (4 * half)) & (2**BITS - 1)
        values = scale[:, :, None] * part.to(tl.float32) + minimum[:, :, None]
        tl.store(out_at + half * 16, values.to(out.dtype.element_ty), mask=mask[:, :, None])
