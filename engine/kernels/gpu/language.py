"""What the Triton kernels share. Plain pointers only, and no more of the language than Triton 3.6 knows."""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter on the CPU (TRITON_INTERPRET=1 in the environment)."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32: float32 operands are not rounded to TF32.

    The interpreter keeps bfloat16 and float8 as raw bits and would multiply those.
    """
    if INTERPRET:
        result = acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, acc, input_precision="ieee")
    return result


@triton.jit
def widen(x, dtype: tl.constexpr):
    """8-bit numbers in a type that can be multiplied. Of float8, the interpreter converts to float32 only."""
    if INTERPRET:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 to the nearest number of an 8-bit type, ties to even; |x| is not above its greatest.

    The sum with 1.5 * 2**23 steps, of the type's numbers around x, keeps whole steps only. Converting is left to be
    exact: the interpreter's does not round, and sm_80's rounds twice.
    """
    if dtype == tl.int8:
        step = tl.zeros_like(x).to(tl.int32)  # exponent
    else:
        mantissa: tl.constexpr = 2 if dtype == tl.float8e5 else 3
        least: tl.constexpr = -14 if dtype == tl.float8e5 else -6
        exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        step = tl.maximum(exponent, least) - mantissa
    steps = (((step + 23 + 127) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + steps) - steps


@triton.jit
def store_vectors(x, numbers, scales, is_stored, HAS_SCALES: tl.constexpr):
    """Store x [n, d] where `is_stored` [n, d], in the type of the pointers `numbers` [n, d].

    An 8-bit type takes float32 `scales` (pointers [n]): each vector's greatest magnitude over the type's greatest
    number. Its elements that are not stored must be 0.
    """
    dtype: tl.constexpr = numbers.dtype.element_ty
    if HAS_SCALES:
        x = x.to(tl.float32)
        greatest: tl.constexpr = 127.0 if dtype == tl.int8 else 57344.0 if dtype == tl.float8e5 else 448.0
        scale = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full([x.shape[0]], greatest, tl.float32))
        x = tl.div_rn(x, tl.broadcast_to(tl.where(scale == 0.0, 1.0, scale)[:, None], x.shape))
        x = round_to(x, dtype)
        tl.store(scales, scale, mask=tl.max(is_stored.to(tl.int32), axis=1) > 0)
    tl.store(numbers, x.to(dtype), mask=is_stored)
