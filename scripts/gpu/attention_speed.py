"""Attention of one layer, as a step calls it (store, then attend), against what the machine can do at most.

Layers are called one behind the other until the cache has been left behind: each has keys and values of its own, so
that nothing comes from a cache of the chip. Where a backend can be captured, the host's time does not count.
"""

import math
from functools import partial
from typing import NamedTuple

import torch

from engine.attention import BACKENDS
from engine.attention.metadata import AttentionBackend, AttentionSpec

from .attention_cases import Blocks, load_backend, make_spec
from .bench import Bench
from .timing import captured, eager, seconds

ROTATED_BYTES = 4e8
"""Keys and values of all layers together: far more than the chip's cache."""
MOST_LAYERS = 48
OWN = "triton"

LLAMA_8B, LLAMA_1B, QWEN3, SMOL = (32, 8, 128), (32, 8, 64), (16, 8, 128), (9, 3, 64)


class Shape(NamedTuple):
    kind: str
    heads: tuple[int, int, int]
    query_lens: list[int]
    context: list[int]
    """Tokens of each sequence that are stored already."""
    block_size: int = 64

    @property
    def name(self) -> str:
        """Length of the last sequence, or of its chunk and what it is behind; two shapes have two names."""
        heads, query, context = "/".join(map(str, self.heads)), self.query_lens[-1], self.context[-1]
        length = f"{query} behind {context}" if query > 1 and context else f"{query + context}"
        blocks = f", blocks of {self.block_size}" if self.block_size != 64 else ""
        return f"{self.kind} {len(self.query_lens)} x {length}, heads {heads}{blocks}"

    @property
    def kv_bytes(self) -> float:
        """In 16 bits."""
        return 4.0 * self.heads[1] * self.heads[2] * (sum(self.context) + sum(self.query_lens))

    @property
    def operations(self) -> float:
        """Two products of the visible pairs."""
        pairs = sum(n * c + n * (n + 1) / 2 for n, c in zip(self.query_lens, self.context, strict=True))
        return 4.0 * self.heads[0] * self.heads[2] * pairs


def decode(heads: tuple[int, int, int], batch: int, length: int, block_size: int = 64) -> Shape:
    return Shape("decode", heads, [1] * batch, [length - 1] * batch, block_size)


def prefill(heads: tuple[int, int, int], batch: int, length: int, context: int = 0) -> Shape:
    return Shape("prefill", heads, [length] * batch, [context] * batch)


SHAPES = (
    decode(LLAMA_8B, 1, 2048),
    decode(LLAMA_8B, 64, 2048),
    prefill(LLAMA_8B, 1, 8192),
    decode(LLAMA_8B, 1, 32768),
    decode(LLAMA_8B, 16, 2048),
    decode(LLAMA_8B, 256, 1024),
    decode(LLAMA_8B, 32, 4096),
    prefill(LLAMA_8B, 8, 1024),
    prefill(LLAMA_8B, 1, 512),
    prefill(LLAMA_8B, 1, 512, context=7680),
    Shape("mixed", LLAMA_8B, [1] * 64 + [1024], [2047] * 64 + [0]),
    decode(LLAMA_8B, 32, 4096, block_size=16),
    decode(LLAMA_8B, 32, 4096, block_size=256),
    decode(LLAMA_1B, 64, 2048),
    decode(LLAMA_1B, 1, 2048),
    prefill(LLAMA_1B, 1, 8192),
    decode(QWEN3, 256, 1024),
    prefill(QWEN3, 16, 1024),
    decode(SMOL, 64, 2048),
    decode(SMOL, 256, 1024),
)
DRY_SHAPES = (decode((2, 1, 16), 2, 20), prefill((2, 1, 16), 1, 6))


def run(bench: Bench) -> None:
    names = sorted(BACKENDS, key=lambda name: name != OWN)  # the own one first, should time run out
    for name in names[:1] if bench.plan.is_dry else names:
        if name == "torch_reference":  # an oracle
            continue
        try:
            backend = load_backend(name)
        except ImportError as error:
            bench.skip(name, str(error))
            continue
        for shape in DRY_SHAPES if bench.plan.is_dry else SHAPES:
            what = f"{name} {shape.name}"
            if bench.has(0.1 if bench.plan.is_dry else 2, what):
                _measure(bench, backend, shape, what, name)


def layer_count(shape: Shape) -> int:
    """So many that the first has left the chip's cache when it comes again."""
    return max(2, min(MOST_LAYERS, math.ceil(ROTATED_BYTES / shape.kv_bytes)))


def _measure(bench: Bench, backend: type[AttentionBackend], shape: Shape, what: str, name: str) -> None:
    layers = 1 if bench.plan.is_dry else layer_count(shape)
    spec = make_spec(shape.heads, bench.plan.device, block_size=shape.block_size, windows=(None,) * layers)
    if reasons := backend.unsupported(spec):
        bench.skip(what, "; ".join(reasons))
        return
    try:
        time, how = time_of_a_layer(backend(spec), spec, shape)
    except Exception as error:
        bench.skip(what, f"{type(error).__name__}: {error}")
        return
    bandwidth, rate = shape.kv_bytes / time, shape.operations / time
    bench.measure(
        what,
        backend=name,
        kind=shape.kind,
        microseconds=1e6 * time,
        megabytes=shape.kv_bytes / 1e6,
        of_bandwidth=bench.of_ceiling("bandwidth", bandwidth),
        teraflops=rate / 1e12,
        of_matrix_rate=bench.of_ceiling("matrix_rate", rate),
        how=how,
    )


def time_of_a_layer(backend: AttentionBackend, spec: AttentionSpec, shape: Shape) -> tuple[float, str]:
    """Seconds, and whether a graph was replayed or the host called."""
    totals = [n + c for n, c in zip(shape.query_lens, shape.context, strict=True)]
    blocks = Blocks.draw(totals, spec.block_size, seed=0)
    cache = backend.allocate(blocks.pool)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    tokens = sum(shape.query_lens)
    q, k, v = (
        torch.randn(tokens, heads, spec.head_dim, device=spec.device).to(spec.dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    backend.prepare(blocks.metadata(shape.context, shape.query_lens, spec.device))
    calls = [partial(backend.run, layer, q, k, v) for layer in range(spec.num_layers)]
    can_capture = backend.captures_decode and shape.kind == "decode"
    run = captured(calls) if can_capture else eager(calls)
    return seconds(run) / spec.num_layers, "graph" if can_capture else "called"
