"""What lies between the matrix products of a decoder layer: norms, rotary embedding and the cache's update, activation.

Every program works on one token, whatever the step holds, and sums in an order that its sizes alone decide: a token's
bits do not depend on the others. All arithmetic is float32; only what is stored is rounded. Rows of the inputs may lie
apart, elements of a row may not.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .language import store_vectors

_ELEMENTS_PER_THREAD = 8
"""Of 16 bits they are one load of 16 bytes."""
_TILE = 1024
"""Elements of a program, where a row is more than one program's."""


class KVStore(NamedTuple):
    """Where new keys and values go: contiguous, [slots, num_kv_heads, head_dim] with any shape of the slots."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    """float32 [slots, num_kv_heads], where the types of the above have 8 bits."""
    value_scales: Tensor | None = None
    slots: Tensor | None = None
    """int64 [num_tokens]: of each token, or -1 to leave it out. None: token i goes into slot i."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (arXiv 1910.07467) of x [rows, size], in the type of `weight` [size]."""
    return add_rms_norm(x, None, weight, eps)[1]


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta [rows, size] in float32 (without a delta x itself), and its norm in the type of `weight` [size]."""
    (rows, size), device = x.shape, x.device
    residual = None if delta is None else torch.empty(rows, size, dtype=torch.float32, device=device)
    out = torch.empty(rows, size, dtype=weight.dtype, device=device)
    block = triton.next_power_of_2(size)
    norm_kernel[(rows,)](
        *(x, delta, weight, residual, out),
        *(_row_stride(x), None if delta is None else _row_stride(delta), eps),
        SIZE=size,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return x if residual is None else residual, out


@triton.jit
def norm_kernel(x, delta, weight, residual, out, x_stride, delta_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One row. Without `delta` there is no `residual`. out and residual [rows, SIZE] are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        value += tl.load(delta + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * SIZE + column, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """gate_up [rows, 2 * size], gates first -> activation(gate) * up [rows, size].

    `activation` is one of `LayerForm`.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(_TILE, triton.next_power_of_2(size))
    gated_kernel[(rows, triton.cdiv(size, block))](
        *(gate_up, out, _row_stride(gate_up)),
        SIZE=size,
        BLOCK=block,
        ACTIVATION=activation,
        num_warps=_num_warps(block),
    )
    return out


@triton.jit
def gated_kernel(gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """A block of one row of `out` [rows, SIZE], which is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        gate *= 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is the logistic function of 2 z
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif ACTIVATION == "relu":
        gate = tl.maximum(gate, 0.0)
    elif ACTIVATION == "relu2":
        gate = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    else:
        tl.static_assert(ACTIVATION == "silu")
        gate *= tl.sigmoid(gate)
    tl.store(out + row * SIZE + column, (gate * up).to(out.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    heads: tuple[int, int, int],
    store: KVStore,
) -> Tensor:
    """Queries and keys are normed per head where there are `norms`, and rotated; keys and values go into `store`.

    qkv [num_tokens, sum(heads) * head_dim] holds the heads of q, then k, then v; cos_sin float32 [num_tokens, head_dim]
    as in `Ops`; norms: weights [head_dim] of q and of k. Returns q [num_tokens, num_heads, head_dim], contiguous.
    """
    num_tokens, head_dim = cos_sin.shape
    assert store.keys.is_contiguous()
    assert store.values.is_contiguous()
    q = torch.empty(num_tokens, heads[0], head_dim, dtype=qkv.dtype, device=qkv.device)
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = min(max(_TILE // block_dim, 1), triton.next_power_of_2(heads[0]))
    num_parts = sum(triton.cdiv(count, block_heads) for count in heads)
    rope_kernel[(num_tokens, num_parts)](
        *(qkv, cos_sin, *(norms or (None, None)), q, *store),
        *(_row_stride(qkv), _row_stride(cos_sin), eps),
        NUM_HEADS=heads[0],
        NUM_KV_HEADS=heads[1],
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=_num_warps(block_heads * block_dim),
    )
    return q


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rope_kernel(
    qkv,
    cos_sin,
    q_norm,
    k_norm,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    qkv_stride,
    cos_sin_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One token and a part of its heads: programs of q, then k, then v."""
    Q_PARTS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, angles = qkv + token * qkv_stride, cos_sin + token * cos_sin_stride
    dim = tl.arange(0, BLOCK_DIM)
    if part < Q_PARTS:
        head = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (head < NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
        offset = head[:, None] * HEAD_DIM
        rotated = _rotated(row + offset, inside, q_norm, angles, eps, HEAD_DIM, BLOCK_DIM)
        tl.store(q + token * NUM_HEADS * HEAD_DIM + offset + dim[None, :], rotated.to(q.dtype.element_ty), mask=inside)
    else:
        slot = token
        if slots is not None:
            slot = tl.load(slots + token)
        if slot >= 0:
            is_key = part < Q_PARTS + KV_PARTS
            head = (part - Q_PARTS) % KV_PARTS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            inside = (head < NUM_KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
            vector = slot * NUM_KV_HEADS + head
            numbers = vector[:, None] * HEAD_DIM + dim[None, :]
            first = row + (NUM_HEADS + head[:, None]) * HEAD_DIM
            if is_key:
                key = _rotated(first, inside, k_norm, angles, eps, HEAD_DIM, BLOCK_DIM).to(qkv.dtype.element_ty)
                _store(key, keys + numbers, key_scales, vector, inside)
            else:
                value = tl.load(first + NUM_KV_HEADS * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
                _store(value, values + numbers, value_scales, vector, inside)


@triton.jit
def _rotated(heads, inside, norm, angles, eps, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Heads [BLOCK_HEADS, BLOCK_DIM] in float32, read from the pointers `heads` [BLOCK_HEADS, 1].

    Element i turns with element i + HEAD_DIM / 2, its partner.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, BLOCK_DIM)
    in_head = dim < HEAD_DIM
    partner_dim = (dim + HALF) % HEAD_DIM
    x = tl.load(heads + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(heads + partner_dim[None, :], mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(angles + dim % HALF, mask=in_head, other=0.0)
    sin = tl.load(angles + HALF + dim % HALF, mask=in_head, other=0.0)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x *= scale * tl.load(norm + dim, mask=in_head, other=0.0).to(tl.float32)[None, :]
        partner *= scale * tl.load(norm + partner_dim, mask=in_head, other=0.0).to(tl.float32)[None, :]
    sin = tl.where(dim < HALF, -sin, sin)
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def _store(x, numbers, scales, vector, inside):
    """As `store_vectors`; `scales` is None where `numbers` have no 8-bit type."""
    if scales is not None:
        store_vectors(x, numbers, scales + vector, inside, HAS_SCALES=True)
    else:
        store_vectors(x, numbers, None, inside, HAS_SCALES=False)


def _row_stride(x: Tensor) -> int:
    assert x.stride(1) == 1 or not x.numel(), f"elements of a row lie apart: {x.shape}, strides {x.stride()}"
    return x.stride(0)


def _num_warps(num_elements: int) -> int:
    return min(max(num_elements // (32 * _ELEMENTS_PER_THREAD), 1), 32)
