"""The kernels of engine/kernels/gpu/attention.py as a backend: every feature, every step, graphs of decode steps."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import triton
from torch import Tensor

from engine.kernels.gpu.attention import add_splits, attend_blocks, attend_splits, store_kv

from .metadata import AttentionMetadata, AttentionSpec
from .paged import PagedAttention

MAX_HEAD_DIM = 256
MAX_GROUP = 128
"""Query heads of a key head; they are the rows of one tile."""
PROGRAMS_PER_PROCESSOR = 8
"""Of the decode kernel: enough to hide each other's latency, and that long sequences do not end much later."""


@dataclass(frozen=True)
class Tiling:
    rows: int
    """Of queries times their group."""
    tile: int
    """Keys."""
    num_warps: int
    num_stages: int
    """Tiles on their way to shared memory, and the one in work."""


def block_tiling(spec: AttentionSpec) -> Tiling:
    """For sequences with several queries: as many rows as registers hold, since each block reads the keys once more."""
    wide, group = padded(spec.head_dim), triton.next_power_of_2(spec.num_heads // spec.num_kv_heads)
    if spec.dtype == torch.float32:  # no matrix instructions
        tiling = Tiling(32, 32, 8, 1) if wide <= 128 else Tiling(16, 32, 8, 1)
    elif spec.capability[0] not in (9, 10):  # GPUs for workstations have a third of their shared memory
        if spec.has_scales:
            tiling = Tiling(64, 64 if wide <= 64 else 32, 4 if wide <= 128 else 8, 2)
        else:
            tiling = Tiling(128, 64, 8, 2) if wide <= 128 else Tiling(64, 32, 8, 2)
    elif spec.has_scales:  # keys pass through registers on their way to the matrix instructions
        tiling = Tiling(64, 64, 4, 3) if wide <= 128 else Tiling(64, 32, 4, 2)
    else:
        tiling = Tiling(128, {128: 64, 256: 32}.get(wide, 128), 8, 3)
    return tiling if group <= tiling.rows else replace(tiling, rows=group, num_warps=8)


def split_tiling(spec: AttentionSpec) -> Tiling:
    """For sequences with one query: what counts are the bytes on their way from memory."""
    wide, group = padded(spec.head_dim), triton.next_power_of_2(spec.num_heads // spec.num_kv_heads)
    rows = max(16, group)
    if spec.dtype == torch.float32:
        return Tiling(rows, 32, 4, 2) if wide <= 128 else Tiling(rows, 16, 8, 1)
    tile = {128: 64, 256: 32}.get(wide, 64 if spec.has_scales or rows > 32 else 128)
    return Tiling(rows, tile, 8 if rows > 32 or (wide == 256 and spec.has_scales) else 4, 3)


def padded(head_dim: int) -> int:
    """To what matrix instructions multiply."""
    return max(16, triton.next_power_of_2(head_dim))


def split_count(num_kv_heads: int, num_processors: int) -> int:
    """Into how many parts, at most, one sequence is cut: alone, it shall keep three processors in four busy."""
    return min(128, triton.next_power_of_2(-(-3 * num_processors // (4 * num_kv_heads))))


class TritonAttention(PagedAttention):
    """A sequence with one query is computed in the same way whatever the others of the step do, and so is one with
    several: its bits do not depend on the batch."""

    name: ClassVar[str] = "triton"
    captures_decode: ClassVar[bool] = True

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = []
        if spec.device.type != "cuda" and not triton.knobs.runtime.interpret:
            reasons.append(f"it needs a CUDA device, not {spec.device.type}")
        if spec.device.type == "cuda" and spec.capability < (8, 0):
            reasons.append(f"it needs compute capability 8.0, not {'.'.join(map(str, spec.capability))}")
        if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reasons.append(f"it does not compute in {spec.dtype}")
        if spec.cache_dtype not in (spec.dtype, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            reasons.append(f"it has no cache of {spec.cache_dtype}")
        if spec.cache_dtype == torch.float8_e4m3fn and spec.device.type == "cuda" and spec.capability < (8, 9):
            reasons.append("a float8_e4m3 cache needs compute capability 8.9")
        if spec.head_dim > MAX_HEAD_DIM:
            reasons.append(f"heads have at most {MAX_HEAD_DIM} dimensions, not {spec.head_dim}")
        if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            reasons.append(f"at most {MAX_GROUP} query heads share a key head")
        return reasons

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.blocks, self.splits = block_tiling(spec), split_tiling(spec)
        self.num_processors = 16
        if spec.device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self.num_splits = split_count(spec.num_kv_heads, self.num_processors)
        self._workspaces: list[tuple[Tensor, Tensor]] = []

    def prepare(self, metadata: AttentionMetadata) -> None:
        super().prepare(metadata)
        query_lens = np.diff(metadata.host_query_start_loc)
        self.has_single, self.has_several = bool((query_lens == 1).any()), bool((query_lens > 1).any())
        if self.has_single:
            self._reserve(len(query_lens))

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        spec, cache, num_tokens = self.spec, self.cache, len(k)
        heads, wide = triton.next_power_of_2(spec.num_kv_heads), triton.next_power_of_2(spec.head_dim)
        store_kv[(num_tokens,)](
            k,
            v,
            cache.keys[layer],
            cache.values[layer],
            *self._scales(layer),
            self.metadata.slot_mapping,
            self._rows(k),
            self._rows(v),
            spec.num_kv_heads,
            heads,
            spec.head_dim,
            wide,
            num_warps=min(8, max(1, heads * wide // 256)),
        )

    def forward(self, layer: int, q: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.has_several:
            self._attend_blocks(layer, q, out)
        if self.has_single:
            self._attend_splits(layer, q, out)
        return out

    def _attend_blocks(self, layer: int, q: Tensor, out: Tensor) -> None:
        metadata, tiling, spec = self.metadata, self.blocks, self.spec
        num_seqs = len(metadata.seq_lens)
        num_blocks = len(q) // (tiling.rows * spec.num_kv_heads // spec.num_heads) + num_seqs
        attend_blocks[(num_blocks, spec.num_kv_heads)](
            q,
            self.cache.keys[layer],
            self.cache.values[layer],
            *self._scales(layer),
            out,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            num_seqs,
            self._rows(q),
            metadata.block_table.stride(0),
            **self._shape(layer, tiling),
        )

    def _attend_splits(self, layer: int, q: Tensor, out: Tensor) -> None:
        metadata, tiling, spec = self.metadata, self.splits, self.spec
        num_seqs = len(metadata.seq_lens)
        programs = -(-PROGRAMS_PER_PROCESSOR * self.num_processors // (spec.num_kv_heads * num_seqs))
        workspace = self._workspaces[-1]
        attend_splits[(spec.num_kv_heads, min(self.num_splits, max(4, programs)), num_seqs)](
            q,
            self.cache.keys[layer],
            self.cache.values[layer],
            *self._scales(layer),
            *workspace,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            self._rows(q),
            metadata.block_table.stride(0),
            **self._shape(layer, tiling),
            NUM_SPLITS=self.num_splits,
        )
        add_splits[(spec.num_heads, num_seqs)](
            *workspace,
            out,
            metadata.query_start_loc,
            metadata.seq_lens,
            spec.windows[layer] or 0,
            spec.head_dim,
            padded(spec.head_dim),
            tiling.tile,
            self.num_splits,
            num_warps=2,
        )

    def _shape(self, layer: int, tiling: Tiling) -> dict[str, int | float]:
        """Constants of both attention kernels."""
        spec = self.spec
        return {
            "SCALE": spec.scale,
            "SOFTCAP": spec.softcap,
            "WINDOW": spec.windows[layer] or 0,
            "GROUP": spec.num_heads // spec.num_kv_heads,
            "NUM_KV_HEADS": spec.num_kv_heads,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_SIZE": spec.block_size,
            "ROWS": tiling.rows,
            "D": padded(spec.head_dim),
            "TILE": tiling.tile,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }

    def _scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        cache = self.cache
        return (cache.key_scales[layer], cache.value_scales[layer]) if self.spec.has_scales else (None, None)

    def _rows(self, x: Tensor) -> int:
        """Heads from one token to the next: x [num_tokens, heads, head_dim] may be a part of a wider tensor."""
        assert x.stride()[1:] == (self.spec.head_dim, 1), x.stride()
        assert x.stride(0) % self.spec.head_dim == 0, x.stride()
        return x.stride(0) // self.spec.head_dim

    def _reserve(self, num_seqs: int) -> None:
        """Outside of captures, as `prepare` is. Graphs keep using the workspace of their capture: none is freed."""
        if self._workspaces and len(self._workspaces[-1][0]) >= num_seqs:
            return
        spec, num_seqs = self.spec, triton.next_power_of_2(num_seqs)
        shape = (num_seqs, spec.num_heads, self.num_splits)
        accs, sums = ((*shape, padded(spec.head_dim)), (2, *shape))
        self._workspaces.append(
            (
                torch.empty(accs, dtype=torch.float32, device=spec.device),
                torch.empty(sums, dtype=torch.float32, device=spec.device),
            )
        )
