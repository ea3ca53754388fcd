"""The layer operations' launches, for `ahead_of_time`: sizes of real models, then what is unusual about others."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.kernels.gpu.layers import KVStore, add_rms_norm, gated, rms_norm, rotate_and_store
from tests.engine.ahead_of_time import Launch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = ("LDG.128",)


def launches(capability: tuple[int, int]) -> Iterator[Launch]:
    for hidden, dtype, slow in ((4096, BF16, False), (576, F16, True), (16384, BF16, True), (5120, F32, True)):
        arguments = (hidden, dtype)
        yield Launch(f"norm {hidden} {dtype}", lambda a=arguments: _norms(*a), {"norm_kernel": WIDE}, slow=slow)
    for size, dtype, activation, slow in (
        (14336, BF16, "silu", False),
        (1536, F16, "gelu", False),
        (8960, F32, "gelu_tanh", True),
        (8960, BF16, "relu", True),
        (8960, BF16, "relu2", True),
    ):
        arguments = (size, dtype, activation)
        name = f"gated {size} {dtype} {activation}"
        yield Launch(name, lambda a=arguments: _gated(*a), {"gated_kernel": WIDE}, slow=slow)
    for heads, head_dim, dtype, cache, qk_norm, slow in (
        ((32, 8), 128, BF16, BF16, False, False),
        ((32, 8), 128, BF16, torch.int8, True, False),
        ((32, 8), 128, BF16, E4M3, True, False),
        ((9, 3), 64, F16, F16, False, False),  # token by token
        ((9, 3), 64, F16, E5M2, False, True),
        ((32, 32), 80, BF16, torch.int8, False, False),
        ((16, 8), 256, F32, F32, True, True),
        ((8, 1), 32, F32, E5M2, True, True),
        ((24, 8), 96, F16, torch.int8, False, True),
        ((14, 2), 64, BF16, E4M3, False, True),
    ):
        if cache == E4M3 and capability < (8, 9):
            continue  # the type came with that capability
        arguments = (heads, head_dim, dtype, cache, qk_norm)
        name = f"rope {heads} of {head_dim} {dtype} -> {cache}" + " normed" * qk_norm
        yield Launch(name, lambda a=arguments: _rotate(*a), {"rope_kernel": WIDE}, slow=slow)


def _norms(hidden: int, dtype: torch.dtype) -> None:
    """The first norm, the next, and all others."""
    weight, delta = _empty(hidden, dtype=dtype), _empty(7, hidden, dtype=dtype)
    rms_norm(delta, weight, 1e-5)
    residual, _ = add_rms_norm(delta, delta, weight, 1e-5)
    add_rms_norm(residual, delta, weight, 1e-5)


def _gated(size: int, dtype: torch.dtype, activation: str) -> None:
    gated(_empty(7, 2 * size, dtype=dtype), activation)


def _rotate(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, cache: torch.dtype, qk_norm: bool) -> None:
    num_heads, num_kv_heads = heads
    keys, values = (_empty(9, 16, num_kv_heads, head_dim, dtype=cache) for _ in "kv")
    scales = [_empty(9, 16, num_kv_heads, dtype=F32) if cache.itemsize == 1 else None for _ in "kv"]
    weight = _empty(head_dim, dtype=dtype)
    rotate_and_store(
        _empty(7, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        _empty(7, head_dim, dtype=F32),
        (weight, weight) if qk_norm else None,
        1e-5,
        (num_heads, num_kv_heads, num_kv_heads),
        KVStore(keys, values, *scales, None if cache == dtype == F16 else _empty(7, dtype=torch.int64)),
    )


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
