"""Attention over sequences whose keys, values and queries are known, step by step through a backend's cache."""

from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from engine.attention import BACKENDS
from engine.attention.metadata import AttentionBackend, AttentionMetadata, AttentionSpec
from engine.attention.paged import rounded

QUERIES_AT_ONCE = 512
"""Whose scores exist together in the oracle."""
GARBAGE = 100.0
"""What memory holds that was never written: a kernel that looks at it is off by far."""


def load_backend(name: str) -> type[AttentionBackend]:
    """A name of the engine's table, or `module:Class`. Raises ImportError where something that it needs is missing."""
    module, class_name = BACKENDS[name] if name in BACKENDS else name.split(":")
    backend: type[AttentionBackend] = getattr(import_module(module), class_name)
    return backend


def make_spec(
    heads: tuple[int, int, int],
    device: str,
    *,
    block_size: int = 64,
    windows: tuple[int | None, ...] = (None,),
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: torch.dtype | None = None,
    softcap: float = 0.0,
) -> AttentionSpec:
    """`heads`: of queries, of keys, and their dimension."""
    num_heads, num_kv_heads, head_dim = heads
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device(device),
        block_size=block_size,
        windows=windows,
        scale=head_dim**-0.5,
        softcap=softcap,
        kv_cache_dtype=kv_cache_dtype,
        capability=torch.cuda.get_device_capability() if device == "cuda" else (0, 0),
    )


@dataclass(frozen=True)
class Blocks:
    """Of sequences that share a pool in random order; block 0 is nobody's."""

    table: np.ndarray  # int32 [num_seqs, max_blocks]
    block_size: int
    pool: int
    """Blocks, the reserved one included."""

    @classmethod
    def draw(cls, lengths: list[int], block_size: int, seed: int) -> "Blocks":
        counts = [-(-length // block_size) for length in lengths]
        order = 1 + np.random.default_rng(seed).permutation(sum(counts) + 1)  # one is left over
        table = np.zeros((len(lengths), max(counts)), np.int32)
        begin = 0
        for row, count in enumerate(counts):
            table[row, :count] = order[begin : begin + count]
            begin += count
        return cls(table, block_size, sum(counts) + 2)

    def metadata(self, before: list[int], query_lens: list[int], device: torch.device) -> AttentionMetadata:
        """`before`: tokens of each sequence whose keys are stored already."""
        slots = [
            self.table[row, (places := np.arange(start, start + length)) // self.block_size].astype(np.int64)
            * self.block_size
            + places % self.block_size
            for row, (start, length) in enumerate(zip(before, query_lens, strict=True))
        ]
        return AttentionMetadata.from_host(
            query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            seq_lens=(np.array(before) + query_lens).astype(np.int32),
            block_table=self.table,
            slot_mapping=np.concatenate(slots),
            device=device,
        )


class Sequences:
    """Random queries, keys and values of all tokens, and what attention makes of them: the oracle, without a cache."""

    def __init__(self, spec: AttentionSpec, lengths: list[int], seed: int) -> None:
        source = torch.Generator(spec.device).manual_seed(seed)
        self.spec = spec

        def draw(length: int, heads: int) -> Tensor:
            return torch.randn(length, heads, spec.head_dim, generator=source, device=spec.device).to(spec.dtype)

        self.q, self.k, self.v = (
            [draw(length, heads) for length in lengths]
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )

    def slice(self, before: list[int], query_lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a step's tokens, packed."""
        bounds = [(start, start + length) for start, length in zip(before, query_lens, strict=True)]
        q, k, v = (
            torch.cat([x[begin:end] for x, (begin, end) in zip(each, bounds, strict=True)])
            for each in (self.q, self.k, self.v)
        )
        return q, k, v

    def attend(self, before: list[int], query_lens: list[int], window: int | None) -> Tensor:
        """float64, packed as the step's queries are."""
        rows = []
        for seq, (start, length) in enumerate(zip(before, query_lens, strict=True)):
            for begin in range(start, start + length, QUERIES_AT_ONCE):
                end = min(begin + QUERIES_AT_ONCE, start + length)
                rows.append(self._attend(seq, begin, end, window))
        return torch.cat(rows)

    def _attend(self, seq: int, begin: int, end: int, window: int | None) -> Tensor:
        spec = self.spec
        repeats = spec.num_heads // spec.num_kv_heads
        k, v = (self._stored(x[seq][:end]).repeat_interleave(repeats, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q[seq][begin:end].double(), k) * spec.scale
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        query = torch.arange(begin, end, device=k.device)[:, None]
        key = torch.arange(end, device=k.device)
        visible = key <= query
        if window is not None:
            visible &= key > query - window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)

    def _stored(self, x: Tensor) -> Tensor:
        """float64, rounded as the cache rounds."""
        if not self.spec.has_scales:
            return x.double()
        numbers, scales = rounded(x, self.spec.cache_dtype)
        return numbers.double() * scales.double()[..., None]


def allocate(backend: AttentionBackend, num_blocks: int) -> None:
    cache = backend.allocate(num_blocks)
    for tensor in (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales):
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x40)  # finite in both float8 types
        else:
            tensor.fill_(GARBAGE)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """|out - expected| / |expected|, Euclidean."""
    out, expected = out.double().flatten(), expected.double().flatten()
    return float((out - expected).norm() / expected.norm())
