"""Attention by the C++ kernels (engine/kernels/cpu/attention.cpp, which draws the cache's layout)."""

import ctypes
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.build import KernelsUnavailable, load_library

from .metadata import AttentionMetadata, AttentionSpec, KVCache
from .storage import zeros

LANES = 16
ROWS_PER_UNIT = 48  # query heads * query tokens that share one pass over the keys
SPLIT = 256  # keys; as in attention.cpp
UNLIMITED = 2**40
POINTER, LONG = ctypes.c_void_p, ctypes.c_long


class _Attention(ctypes.Structure):
    """`Attention` of attention.cpp."""

    _fields_ = (
        *((name, LONG) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "max_blocks")),
        *((name, LONG) for name in ("num_tokens", "num_units", "num_merges", "slot_size")),
        *((name, ctypes.c_int) for name in ("num_threads", "rounded_cache")),
        *((name, POINTER) for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")),
        *((name, POINTER) for name in ("units", "first_part", "merges", "partials")),
    )


class _Plan(NamedTuple):
    """Who computes what; see the picture in attention.cpp."""

    units: np.ndarray  # int32 [num_units + 1, 7]: the fields of `Unit` there; the last one marks the end
    first_part: np.ndarray  # int32 [num_threads + 1]: the parts of each thread
    merges: np.ndarray  # int32 [num_merges]: units of which several threads have parts
    num_slots: int


class CPUAttention:
    name: ClassVar[str] = "cpu"
    captures_decode: ClassVar[bool] = False

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = []
        if spec.device.type != "cpu":
            reasons.append(f"runs on CPUs, not on {spec.device.type}")
        if spec.dtype not in (torch.float32, torch.bfloat16):
            reasons.append(f"has no kernels for {spec.dtype}")
        if spec.has_scales and spec.kv_cache_dtype != torch.int8:
            reasons.append(f"keeps no {spec.kv_cache_dtype} cache")
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
        most_rows = max(ROWS_PER_UNIT, spec.num_heads // spec.num_kv_heads)
        self.partials = torch.empty(0, most_rows * (spec.head_dim + 2))
        self._attention = getattr(load_library(), f"attention_{str(spec.dtype).removeprefix('torch.')}")
        self._attention.argtypes = [POINTER] * 7 + [ctypes.c_float, ctypes.c_float, LONG]
        self.decode_plans: dict[int | None, tuple[tuple[bytes, bytes], _Plan]] = {}
        self.steps = {window: _Attention() for window in spec.windows}  # refilled by each step, at the same addresses

    def allocate(self, num_blocks: int) -> KVCache:
        spec, dtype = self.spec, self.spec.kv_cache_dtype or self.spec.dtype
        group = LANES * spec.vector_bytes // dtype.itemsize
        shape = (num_blocks, spec.num_kv_heads, spec.block_size // LANES, group)
        keys, values = ([zeros(shape, dtype, spec.device) for _ in range(spec.num_layers)] for _ in "kv")
        self.cache = KVCache(keys, values, num_blocks)
        return self.cache

    def layer_arguments(self, layer: int) -> tuple[int, int, int, float, float, int]:
        """What the kernel has to know about a layer: the same in every step. Step and cache by their addresses."""
        spec, window = self.spec, self.spec.windows[layer]
        return (
            ctypes.addressof(self.steps[window]),
            *(self.cache.keys[layer].data_ptr(), self.cache.values[layer].data_ptr()),
            *(spec.scale, spec.softcap, window or UNLIMITED),
        )

    def prepare(self, metadata: AttentionMetadata) -> None:
        spec, num_tokens = self.spec, len(metadata.slot_mapping)
        if num_tokens > len(self.out):
            self.out = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype)
        self.step_out = self.out[:num_tokens]
        plans = {window: self._plan_again(metadata, window) for window in self.steps}
        num_slots = max(plan.num_slots for plan in plans.values())
        if num_slots > len(self.partials):
            self.partials = torch.empty(num_slots, self.partials.shape[1])
        for window, plan in plans.items():
            self._fill(self.steps[window], metadata, plan)
        self.keep_alive = (metadata, plans)

    def _fill(self, step: _Attention, metadata: AttentionMetadata, plan: _Plan) -> None:
        spec = self.spec
        tensors = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table, metadata.slot_mapping)
        assert all(tensor.is_contiguous() for tensor in tensors)
        arrays = (plan.units, plan.first_part, plan.merges)
        values = (
            *(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, metadata.block_table.shape[1]),
            *(len(metadata.slot_mapping), len(plan.units) - 1, len(plan.merges), self.partials.shape[1]),
            *(self.num_threads, spec.kv_cache_dtype == torch.int8),
            *(tensor.data_ptr() for tensor in tensors),
            *(array.ctypes.data for array in arrays),
            self.partials.data_ptr(),
        )
        for field, value in zip(_Attention._fields_, values, strict=True):
            setattr(step, field[0], value)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the protocol has it; the result is overwritten by the next call."""
        step, keys, values, *scores = self.layer_arguments(layer)
        tensors = (q, k, v, self.step_out)
        self._attention(step, keys, values, *(tensor.data_ptr() for tensor in tensors), *scores)
        return self.step_out

    def _plan_again(self, metadata: AttentionMetadata, window: int | None) -> _Plan:
        """The last plan, as long as each sequence decodes one token more in the same splits of keys."""
        starts, seq_lens = metadata.host_query_start_loc, metadata.host_seq_lens.astype(np.int64)
        if starts[-1] != len(seq_lens):
            return self._plan(metadata, window or UNLIMITED)
        splits = (-(-seq_lens // SPLIT)).tobytes(), (np.maximum(0, seq_lens - (window or UNLIMITED)) // SPLIT).tobytes()
        known, plan = self.decode_plans.get(window, (None, None))
        if plan is None or known != splits:
            plan = self._plan(metadata, window or UNLIMITED)
            self.decode_plans[window] = splits, plan
        return plan

    def _plan(self, metadata: AttentionMetadata, window: int) -> _Plan:
        """Each thread gets an equal share of rows * keys, as near as whole parts allow."""
        units, parts, cost = self._units(metadata, window)
        first_part_of_unit, cost_before = (np.concatenate(([0], np.cumsum(x))) for x in (parts, cost))
        shares = np.linspace(0, cost_before[-1], self.num_threads + 1)
        first_part = np.rint(np.interp(shares, cost_before, first_part_of_unit)).astype(np.int32)
        unit = np.searchsorted(first_part_of_unit, first_part, "right") - 1  # in which each share begins
        merges = np.unique(unit[first_part > first_part_of_unit[unit]])
        units[:, 5] = first_part_of_unit
        slots = np.concatenate(([0], np.cumsum(parts[merges])))
        units[merges, 6] = slots[:-1]
        return _Plan(units, first_part, merges.astype(np.int32), int(slots[-1]))

    def _units(self, metadata: AttentionMetadata, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Units without `first_part` and `slot`, and of each one the number of parts and rows * keys."""
        starts, seq_lens = metadata.host_query_start_loc, metadata.host_seq_lens
        query_lens, kv_heads = np.diff(starts), self.spec.num_kv_heads
        group = self.spec.num_heads // kv_heads
        tokens_per_unit = max(1, ROWS_PER_UNIT // group)
        tiles = -(-query_lens // tokens_per_unit)  # per sequence
        sequence = np.repeat(np.arange(len(tiles)), tiles)
        tile_in_sequence = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        first = tile_in_sequence * tokens_per_unit
        count = np.minimum(tokens_per_unit, query_lens[sequence] - first)
        position = (seq_lens - query_lens)[sequence] + first
        low, high = np.maximum(0, position + 1 - window), position + count  # keys that some row sees
        units = np.full((len(sequence) * kv_heads + 1, 7), -1, dtype=np.int32)
        for column, values in enumerate((sequence, None, first, count, low // SPLIT)):
            each = np.tile(np.arange(kv_heads), len(sequence)) if values is None else np.repeat(values, kv_heads)
            units[:-1, column] = each
        parts = -(-high // SPLIT) - low // SPLIT
        return units, np.repeat(parts, kv_heads), np.repeat((count * group + 4) * (high - low), kv_heads)
