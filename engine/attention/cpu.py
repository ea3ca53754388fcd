"""Attention by the C++ kernels (engine/kernels/cpu/attention.cpp, which draws the cache's layout)."""

import ctypes
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.build import KernelsUnavailable, load_library

from .metadata import AttentionMetadata, AttentionSpec, KVCache
from .storage import zeros

LANES = 16
ROWS_PER_UNIT = 48  # query heads * query tokens that share one pass over the keys
UNLIMITED = 2**40
POINTER, LONG = ctypes.c_void_p, ctypes.c_long


class _Attention(ctypes.Structure):
    """`Attention` of attention.cpp."""

    _fields_ = (
        *((name, LONG) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "max_blocks")),
        *((name, LONG) for name in ("num_tokens", "num_units")),
        ("num_threads", ctypes.c_int),
        *((name, POINTER) for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")),
        *((name, POINTER) for name in ("units", "first_unit")),
    )


class CPUAttention:
    name: ClassVar[str] = "cpu"

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = []
        if spec.device.type != "cpu":
            reasons.append(f"runs on CPUs, not on {spec.device.type}")
        if spec.dtype not in (torch.float32, torch.bfloat16):
            reasons.append(f"has no kernels for {spec.dtype}")
        if spec.head_dim % LANES:
            reasons.append(f"head_dim {spec.head_dim} is no multiple of {LANES}")
        if spec.block_size % LANES:
            reasons.append(f"block_size {spec.block_size} is no multiple of {LANES}")
        if not reasons:
            try:
                load_library()
            except KernelsUnavailable as error:
                reasons.append(str(error))
        return reasons

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.num_threads = torch.get_num_threads()
        self.out = torch.empty(0, spec.num_heads, spec.head_dim, dtype=spec.dtype)
        self._attention = getattr(load_library(), f"attention_{str(spec.dtype).removeprefix('torch.')}")
        self._attention.argtypes = [POINTER] * 7 + [ctypes.c_float, LONG]

    def allocate(self, num_blocks: int) -> KVCache:
        spec = self.spec
        shape = (num_blocks, spec.num_kv_heads, spec.block_size // LANES, LANES * spec.head_dim)
        keys, values = ([zeros(shape, spec.dtype, spec.device) for _ in range(spec.num_layers)] for _ in "kv")
        self.cache = KVCache(keys, values, num_blocks)
        return self.cache

    def prepare(self, metadata: AttentionMetadata) -> None:
        units, first_unit = self._plan(metadata)
        tensors = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table, metadata.slot_mapping)
        spec, num_tokens = self.spec, len(metadata.slot_mapping)
        self.step = _Attention(
            *(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, metadata.block_table.shape[1]),
            *(num_tokens, len(units), self.num_threads),
            *(tensor.data_ptr() for tensor in tensors),
            *(units.ctypes.data, first_unit.ctypes.data),
        )
        assert all(tensor.is_contiguous() for tensor in tensors)
        self.keep_alive = (metadata, units, first_unit)
        if num_tokens > len(self.out):
            self.out = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype)
        self.step_out = self.out[:num_tokens]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """As the protocol has it; the result is overwritten by the next call."""
        self._attention(
            *(ctypes.addressof(self.step), self.cache.keys[layer].data_ptr(), self.cache.values[layer].data_ptr()),
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), self.step_out.data_ptr()),
            *(scale, window or UNLIMITED),
        )
        return self.step_out

    def _plan(self, metadata: AttentionMetadata) -> tuple[np.ndarray, np.ndarray]:
        """Units of work: int32 [num_units, 4] of (sequence, kv head, first query token, query tokens), and int32
        [num_threads + 1], where each thread's units start; threads get equal shares of rows * keys."""
        starts, seq_lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy()
        query_lens, kv_heads = np.diff(starts), self.spec.num_kv_heads
        group = self.spec.num_heads // kv_heads
        tokens_per_unit = max(1, ROWS_PER_UNIT // group)
        tiles = -(-query_lens // tokens_per_unit)  # per sequence
        sequence = np.repeat(np.arange(len(tiles)), tiles)
        tile_in_sequence = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        first = tile_in_sequence * tokens_per_unit
        count = np.minimum(tokens_per_unit, query_lens[sequence] - first)
        keys = (seq_lens - query_lens)[sequence] + first + count
        units = np.empty((len(sequence), kv_heads, 4), dtype=np.int32)
        for column, values in enumerate((sequence, None, first, count)):
            units[:, :, column] = np.arange(kv_heads) if values is None else values[:, None]
        cost = np.cumsum(np.repeat((count * group + 4) * keys, kv_heads))
        shares = np.arange(1, self.num_threads) * (cost[-1] if len(cost) else 0) / self.num_threads
        first_unit = np.concatenate(([0], np.searchsorted(cost, shares), [len(cost)])).astype(np.int32)
        return units.reshape(-1, 4), first_unit
