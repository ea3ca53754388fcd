"""Linear layers of float8: weights with a scale per row, and activations rounded with a scale per token."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .language import store_vectors


class Float8Linear(NamedTuple):
    numbers: Tensor  # float8_e4m3fn [rows, columns]
    scale: Tensor  # float32 [rows]
    bias: Tensor | None  # [rows]

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [num_tokens, columns] -> [num_tokens, rows], of the type of x or of `dtype`."""
        numbers, scale = round_tokens(x)
        # bfloat16 is what torch multiplies into on every GPU; the fast accumulation of Hopper keeps 14 bits of a sum,
        # the rounded factors have 4.
        out = torch._scaled_mm(
            *(numbers, self.numbers.t(), scale, self.scale[None, :]), out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(dtype or x.dtype)
        return out if self.bias is None else out + self.bias


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [num_tokens, columns] -> float8_e4m3fn [num_tokens, columns] and float32 scales [num_tokens, 1]."""
    x = x.contiguous()
    num_tokens, columns = x.shape
    numbers = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(num_tokens, 1, dtype=torch.float32)
    block = triton.next_power_of_2(columns)
    _round[num_tokens,](x, numbers, scale, columns, BLOCK=block, num_warps=min(16, max(1, block // 1024)))
    return numbers, scale


@triton.jit
def _round(x, numbers, scale, columns, BLOCK: tl.constexpr):
    """A program: one token."""
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_stored = (column < columns)[None, :]
    at = token.to(tl.int64) * columns + column[None, :]
    row = tl.load(x + at, mask=is_stored, other=0.0)
    store_vectors(row, numbers + at, scale + token + tl.arange(0, 1), is_stored, True)
