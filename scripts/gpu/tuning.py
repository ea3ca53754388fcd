"""Other tilings of the attention kernels than the shipped ones, as many as there is time for; nothing is changed."""

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import torch

from engine.attention import triton_paged
from engine.attention.metadata import AttentionSpec
from engine.attention.triton_paged import Tiling, TritonAttention, block_tiling, split_tiling

from .attention_cases import make_spec
from .attention_speed import LLAMA_1B, LLAMA_8B, Shape, decode, layer_count, prefill, time_of_a_layer
from .bench import Bench

SPLITS = tuple(
    Tiling(16, tile, warps, stages)
    for tile, warps, stages in (
        (64, 4, 3),
        (128, 4, 3),
        (64, 4, 4),
        (128, 8, 2),
        (32, 4, 4),
        (64, 2, 3),
        (128, 4, 2),
        (64, 8, 3),
        (32, 2, 4),
    )
)
BLOCKS = tuple(
    Tiling(*numbers)
    for numbers in (
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (128, 64, 8, 2),
        (128, 64, 4, 3),
        (64, 128, 4, 3),
        (256, 64, 8, 2),
        (128, 32, 8, 4),
        (128, 128, 8, 3),
    )
)
PROGRAMS = (2, 4, 16, 32)
"""Per processor."""

DECODES = (decode(LLAMA_8B, 64, 2048), decode(LLAMA_8B, 1, 32768), decode(LLAMA_8B, 256, 1024))
PREFILLS = (prefill(LLAMA_8B, 1, 8192), prefill(LLAMA_8B, 8, 1024))
SMALLER_DECODES, SMALLER_PREFILLS = (decode(LLAMA_1B, 64, 2048),), (prefill(LLAMA_1B, 1, 8192),)
DRY_DECODES, DRY_PREFILLS = (decode((2, 1, 16), 2, 20),), (prefill((2, 1, 16), 1, 6),)


def run(bench: Bench) -> None:
    if bench.plan.is_dry:
        _sweep(bench, DRY_DECODES, SPLITS[:1])
        _sweep(bench, DRY_PREFILLS, ())
        return
    _sweep(bench, DECODES, SPLITS)
    _sweep(bench, PREFILLS, BLOCKS)
    _sweep_programs(bench, DECODES)
    _sweep(bench, SMALLER_DECODES, SPLITS)
    _sweep(bench, SMALLER_PREFILLS, BLOCKS)


def _spec(bench: Bench, shape: Shape) -> AttentionSpec:
    windows = (None,) * (1 if bench.plan.is_dry else layer_count(shape))
    return make_spec(shape.heads, bench.plan.device, block_size=shape.block_size, windows=windows)


def _sweep(bench: Bench, shapes: Sequence[Shape], tilings: Sequence[Tiling]) -> None:
    """All shapes, of one kind and with equal heads, at each tiling: it is compiled once."""
    spec = _spec(bench, shapes[0])
    shipped = split_tiling(spec) if shapes[0].kind == "decode" else block_tiling(spec)
    times: dict[Tiling, list[float]] = {}
    for tiling in dict.fromkeys((shipped, *tilings)):
        if not bench.has(0.5 if bench.plan.is_dry else 4, f"{shapes[0].kind} {_text(tiling)}"):
            break
        try:
            times[tiling] = [_time(bench, shape, tiling) for shape in shapes]
        except Exception as error:  # more shared memory or registers than there are
            bench.skip(f"{shapes[0].kind} {_text(tiling)}", f"{type(error).__name__}: {error}")
    for index, shape in enumerate(shapes):
        if shipped in times:
            best = min(times, key=lambda tiling: times[tiling][index])
            bench.measure(
                shape.name,
                shipped=_text(shipped),
                shipped_microseconds=1e6 * times[shipped][index],
                best=_text(best),
                best_microseconds=1e6 * times[best][index],
                all={_text(tiling): 1e6 * each[index] for tiling, each in times.items()},
            )


def _time(bench: Bench, shape: Shape, tiling: Tiling) -> float:
    spec = _spec(bench, shape)
    backend = TritonAttention(spec)
    if shape.kind == "decode":
        backend.splits = tiling
    else:
        backend.blocks = tiling
    seconds, _ = time_of_a_layer(backend, spec, shape)
    torch.cuda.empty_cache()
    return seconds


def _sweep_programs(bench: Bench, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        if bench.has(3, f"programs of {shape.name}"):
            bench.measure(f"programs of {shape.name}", microseconds=dict(_program_times(bench, shape)))


def _program_times(bench: Bench, shape: Shape) -> Iterator[tuple[str, float]]:
    for programs in (triton_paged.PROGRAMS_PER_PROCESSOR, *PROGRAMS):
        with patch.object(triton_paged, "PROGRAMS_PER_PROCESSOR", programs):
            yield str(programs), 1e6 * _time(bench, shape, split_tiling(_spec(bench, shape)))


def _text(tiling: Tiling) -> str:
    return f"{tiling.rows}x{tiling.tile}, {tiling.num_warps} warps, {tiling.num_stages} stages"
