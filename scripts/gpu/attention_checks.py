"""Every attention backend against attention written out in float64, on this device.

Sequences are read in chunks, mixed with single tokens, out of blocks in random order; a layer with a sliding window
and one without share the cache's blocks. What can be captured is also replayed with changed lengths and blocks.
"""

from typing import Any, NamedTuple

import torch

from engine.attention.metadata import AttentionBackend, AttentionSpec

from .attention_cases import Blocks, Sequences, allocate, load_backend, make_spec, relative_error
from .bench import Bench
from .timing import captured

LIMITS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.2e-2}
"""Relative error: some roundings of the type. Where the cache has 8 bits, a number may round the other way:"""
LIMIT_8_BITS = 2e-2


class Case(NamedTuple):
    heads: tuple[int, int, int]
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed


LLAMA_8B = (32, 8, 128)
CASES = (
    Case(LLAMA_8B),
    Case((16, 8, 128)),
    Case((32, 8, 64)),
    Case((9, 3, 64)),
    Case(LLAMA_8B, {"block_size": 16}),
    Case(LLAMA_8B, {"block_size": 256}),
    Case(LLAMA_8B, {"kv_cache_dtype": torch.int8}),
    Case(LLAMA_8B, {"kv_cache_dtype": torch.float8_e4m3fn}),
    Case(LLAMA_8B, {"softcap": 30.0}),
    Case((14, 2, 64)),
    Case((8, 4, 256)),
    Case((6, 2, 80), {"block_size": 16}),
    Case((32, 32, 128)),
    Case(LLAMA_8B, {"dtype": torch.float16}),
    Case((9, 3, 64), {"dtype": torch.float32}),
    Case(LLAMA_8B, {"kv_cache_dtype": torch.float8_e5m2}),
)
DRY_CASES = (
    Case((4, 2, 16), {"block_size": 16}),
    Case((3, 1, 32), {"block_size": 16, "dtype": torch.float32}),
    # The interpreter takes integers for bfloat16's bits.
    Case((2, 1, 16), {"block_size": 16, "kv_cache_dtype": torch.int8, "dtype": torch.float16}),
)

# Tokens of each sequence in each step. 0: the sequence is not in it.
STEPS = ([700, 17, 1, 64, 3000], [1, 130, 0, 1, 1000], [1, 1, 1, 1, 1], [0, 500, 77, 1, 1], [1, 1, 1, 1, 1])
DRY_STEPS = ([17, 1], [1, 4], [1, 1])
WINDOW, DRY_WINDOW = 100, 9


def run(bench: Bench, name: str) -> None:
    try:
        backend = load_backend(name)
    except ImportError as error:
        bench.skip(name, str(error))
        return
    for case in DRY_CASES if bench.plan.is_dry else CASES:
        what = " ".join(map(str, ("/".join(map(str, case.heads)), *(f"{k}={v}" for k, v in case.options.items()))))
        if not bench.has(3, what):
            continue
        windows = (None, DRY_WINDOW if bench.plan.is_dry else WINDOW)
        spec = make_spec(case.heads, bench.plan.device, windows=windows, **case.options)
        if reasons := backend.unsupported(spec):
            bench.skip(what, "; ".join(reasons))
            continue
        try:
            check(bench, backend, spec, what)
        except Exception as error:
            bench.fail(what, error)


def check(bench: Bench, backend: type[AttentionBackend], spec: AttentionSpec, what: str) -> None:
    limit = LIMIT_8_BITS if spec.has_scales else LIMITS[spec.dtype]
    steps = DRY_STEPS if bench.plan.is_dry else STEPS
    bench.check(what, worst_error(backend, spec, steps), limit)
    if backend.captures_decode:
        lengths = [[3, 17], [18, 2]] if bench.plan.is_dry else [[1000, 70, 1, 512], [3, 640, 1023, 64]]
        bench.check(f"{what}, replayed", replay_error(backend, spec, *lengths), limit)


def worst_error(backend_class: type[AttentionBackend], spec: AttentionSpec, steps: tuple[list[int], ...]) -> float:
    """Of all steps and layers."""
    totals = [sum(lengths) for lengths in zip(*steps, strict=True)]
    blocks, sequences = Blocks.draw(totals, spec.block_size, seed=0), Sequences(spec, totals, seed=1)
    backend = backend_class(spec)
    allocate(backend, blocks.pool)
    before, worst = [0] * len(totals), 0.0
    for query_lens in steps:
        present = [seq for seq, length in enumerate(query_lens) if length]
        step = Blocks(blocks.table[present], blocks.block_size, blocks.pool)
        counts = [query_lens[seq] for seq in present]
        backend.prepare(step.metadata([before[seq] for seq in present], counts, spec.device))
        for layer, window in enumerate(spec.windows):
            out = backend.run(layer, *sequences.slice(before, query_lens))
            error = relative_error(out, sequences.attend(before, query_lens, window))
            worst = error if not error <= worst else worst  # NaN stays
        before = [start + length for start, length in zip(before, query_lens, strict=True)]
    return worst


def replay_error(
    backend_class: type[AttentionBackend], spec: AttentionSpec, captured_at: list[int], replayed_at: list[int]
) -> float:
    """Of one decode step, captured with some lengths and blocks and replayed with others.

    Lists: the tokens of each sequence before the step.
    """
    most = [max(pair) + 1 for pair in zip(captured_at, replayed_at, strict=True)]
    ones = [1] * len(most)
    backend, sequences = backend_class(spec), Sequences(spec, most, seed=2)
    first, second = (Blocks.draw([max(most)] * len(most), spec.block_size, seed=seed) for seed in (0, 1))
    allocate(backend, first.pool)

    _store(backend, sequences, first, captured_at)
    metadata = first.metadata(captured_at, ones, spec.device)
    metadata.host_seq_lens[:] = max(most)
    inputs = [x.clone() for x in sequences.slice(captured_at, ones)]
    backend.prepare(metadata)
    out = []
    replay = captured([lambda: out.append(backend.run(0, *inputs))])
    prepared = dict(vars(backend))

    _store(backend, sequences, second, replayed_at)
    vars(backend).update(prepared)  # for work that is done again on a CPU; a graph keeps its addresses
    changed = second.metadata(replayed_at, ones, spec.device)
    for name in ("seq_lens", "block_table", "slot_mapping"):
        getattr(metadata, name).copy_(getattr(changed, name))
    for x, new in zip(inputs, sequences.slice(replayed_at, ones), strict=True):
        x.copy_(new)
    replay()
    return relative_error(out[-1], sequences.attend(replayed_at, ones, spec.windows[0]))


def _store(backend: AttentionBackend, sequences: Sequences, blocks: Blocks, lengths: list[int]) -> None:
    """Keys and values of the first tokens of each sequence, as one step."""
    zeros = [0] * len(lengths)
    backend.prepare(blocks.metadata(zeros, lengths, sequences.spec.device))
    backend.run(0, *sequences.slice(zeros, lengths))
