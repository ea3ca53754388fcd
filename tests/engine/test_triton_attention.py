"""The Triton backend in Triton's interpreter: against attention written out, and equalities between its own steps."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from configs.sampling import SamplingParams
from engine.attention.metadata import AttentionMetadata, AttentionSpec
from engine.attention.paged import rounded
from engine.attention.triton_paged import TritonAttention, split_count
from engine.kernels.gpu.attention import _sequence_of
from tests.engine.attention_runs import dense, make_spec, run_steps, step_metadata
from tests.engine.core_runs import make_core, random_prompts, token_ids
from tests.engine.paged_runs import PagedRun, load
from tests.engine.tiny_models import write_tiny

F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

STEPS = [[34, 3, 0], [1, 12, 5]]
"""Prompts; a decode, a chunk and a prompt."""
TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 4e-2}
"""The interpreter cuts numbers off where it makes bfloat16 of them."""
FACTORS = (
    [(9, 3, 64), (4, 4, 32), (8, 1, 128), (6, 2, 80), (16, 2, 256), (6, 2, 96)],
    [16, 64],  # block size
    [0.0, 1.5],  # soft cap
    [F32, F16, BF16],
    [None, INT8, E4M3, E5M2],
    [None, 24],  # window
)


def pairwise(factors: tuple[list[object], ...]) -> Iterator[tuple[object, ...]]:
    """Few rows, in which every pair of two factors' values is together."""

    def pairs(row: tuple[object, ...]) -> set[object]:
        return set(itertools.combinations(enumerate(row), 2))

    rows = list(itertools.product(*factors))
    wanted = set().union(*map(pairs, rows))
    while wanted:
        best = max(rows, key=lambda row: len(pairs(row) & wanted))
        wanted -= pairs(best)
        yield best


@pytest.mark.parametrize(("heads", "block_size", "softcap", "dtype", "cache_dtype", "window"), list(pairwise(FACTORS)))
def test_steps_equal_dense_attention(
    heads: tuple[int, int, int],
    block_size: int,
    softcap: float,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    window: int | None,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    spec = make_spec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=block_size,
        windows=(window,),
        scale=head_dim**-0.5,
        softcap=softcap,
        kv_cache_dtype=cache_dtype,
    )
    rounds_like = BF16 if dtype == F16 and spec.has_scales else dtype  # see test_rounded_values_may_be_small
    assert run_steps(TritonAttention(spec), spec, STEPS) < TOLERANCE[rounds_like]


@pytest.mark.parametrize("window", [1, 15, 16, 17, 200])
def test_any_window(window: int) -> None:
    spec = make_spec(windows=(window,))
    assert run_steps(TritonAttention(spec), spec, [[80, 3], [1, 40]]) < 2e-5


@pytest.mark.parametrize("block_size", [1, 7, 16, 48, 256])
def test_any_block_size(block_size: int) -> None:
    spec = make_spec(block_size=block_size, windows=(24,))
    assert run_steps(TritonAttention(spec), spec, STEPS) < 2e-5


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(40, 1), (5, 5), (14, 2)])
def test_any_group(num_heads: int, num_kv_heads: int) -> None:
    spec = make_spec(num_heads=num_heads, num_kv_heads=num_kv_heads, windows=(None,))
    assert run_steps(TritonAttention(spec), spec, STEPS) < 2e-5


def test_lengths_around_blocks_and_tiles() -> None:
    spec = make_spec(num_heads=2, num_kv_heads=1, windows=(None,))
    lengths = [1, 15, 16, 17, 127, 128, 129]
    assert run_steps(TritonAttention(spec), spec, [lengths, [1] * 7, [1] * 7]) < 2e-5


def test_sequences_share_blocks() -> None:
    spec = make_spec(windows=(None,))
    assert run_steps(TritonAttention(spec), spec, [[70, 5], [1, 1]], shared=64) < 2e-5


@triton.jit
def places(query_start_loc, out, num_seqs, BLOCK: tl.constexpr):
    seq, block = _sequence_of(query_start_loc, tl.program_id(0), num_seqs, BLOCK)
    tl.store(out + 2 * tl.program_id(0), seq)
    tl.store(out + 2 * tl.program_id(0) + 1, block)


def test_every_block_of_queries_of_many_sequences_is_found() -> None:
    lens = np.random.default_rng(0).integers(0, 12, 300)
    query_start_loc = torch.tensor([0, *lens]).cumsum(0).int()
    out = torch.empty(int(lens.sum()) // 5 + 300, 2, dtype=torch.int32)
    places[(len(out),)](query_start_loc, out, 300, 5)
    found = [tuple(place) for place in out.tolist()]
    assert len(set(found)) == len(found)
    assert {(seq, block) for seq, n in enumerate(lens) for block in range(-(-n // 5))} <= set(found)


# --- splits


class LongSequence:
    """One sequence of 4300 positions in the cache, and the query that sees it."""

    def __init__(self) -> None:
        self.spec = make_spec(num_heads=3, num_kv_heads=1, windows=(None, 1500), block_size=64)
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = torch.randn(2, 4300, 1, 16, generator=generator)
        self.q = torch.randn(1, 3, 16, generator=generator)
        self.blocks = 1 + torch.randperm(68, generator=generator).view(1, -1)

    def attend(self, layer: int, length: int, num_splits: int, num_processors: int) -> Tensor:
        backend = TritonAttention(self.spec)
        backend.num_splits, backend.num_processors = num_splits, num_processors
        cache = backend.allocate(69)
        slots = step_metadata(self.spec, self.blocks, [slice(0, 4300)]).slot_mapping
        for numbers, x in ((cache.keys[layer], self.k), (cache.values[layer], self.v)):
            numbers.flatten(0, 1)[slots] = x
        backend.prepare(step_metadata(self.spec, self.blocks, [slice(length - 1, length)]))
        return backend.forward(layer, self.q)


@pytest.fixture(scope="module")
def long_sequence() -> LongSequence:
    return LongSequence()


@pytest.mark.parametrize("num_splits", [1, 2, 4, 16])
@pytest.mark.parametrize("layer", [0, 1])
def test_any_number_of_splits(long_sequence: LongSequence, layer: int, num_splits: int) -> None:
    for length in (257, 4300):
        k, v = long_sequence.k[:length], long_sequence.v[:length]
        expected = dense(long_sequence.q, k, v, long_sequence.spec.windows[layer], 0.3)
        out = long_sequence.attend(layer, length, num_splits, 16)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_bits_do_not_depend_on_the_programs_that_share_the_splits(long_sequence: LongSequence) -> None:
    assert torch.equal(long_sequence.attend(0, 4300, 16, 1), long_sequence.attend(0, 4300, 16, 1000))


def test_one_sequence_keeps_most_of_a_gpu_busy() -> None:
    for num_kv_heads in (1, 2, 3, 4, 5, 8, 16, 32):
        splits = split_count(num_kv_heads, 132)
        assert splits & (splits - 1) == 0
        assert num_kv_heads * splits >= 0.75 * 132


# --- bits


def random_steps(spec: AttentionSpec, num_seqs: int, length: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v [num_seqs, length, heads, head_dim], and blocks [num_seqs, blocks]."""
    generator = torch.Generator().manual_seed(1)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    qkv = [torch.randn(num_seqs, length, each, spec.head_dim, generator=generator).to(spec.dtype) for each in heads]
    max_blocks = -(-length // spec.block_size)
    return qkv, 1 + torch.randperm(num_seqs * max_blocks, generator=generator).view(num_seqs, -1)


def attend(backend: TritonAttention, qkv: list[Tensor], blocks: Tensor, spans: dict[int, slice]) -> dict[int, Tensor]:
    """A step of some of the sequences."""
    metadata = step_metadata(backend.spec, blocks[list(spans)], list(spans.values()))
    backend.prepare(metadata)
    out = backend.run(0, *(torch.cat([x[s][span] for s, span in spans.items()]) for x in qkv))
    return dict(zip(spans, out.split([span.stop - span.start for span in spans.values()]), strict=True))


def test_bits_of_a_sequence_do_not_depend_on_its_batch() -> None:
    spec = make_spec(windows=(None,))
    qkv, blocks = random_steps(spec, 4, 101)
    backend = TritonAttention(spec)
    backend.allocate(1 + blocks.numel())
    prompts = {0: slice(0, 100), 1: slice(0, 20), 2: slice(0, 50), 3: slice(0, 1)}
    together = attend(backend, qkv, blocks, prompts)
    for seq, span in prompts.items():
        assert torch.equal(attend(backend, qkv, blocks, {seq: span})[seq], together[seq])
    decodes = {0: slice(100, 101), 1: slice(20, 21), 3: slice(1, 2)}
    decoded = attend(backend, qkv, blocks, decodes)
    beside_a_prompt = attend(backend, qkv, blocks, {**decodes, 2: slice(0, 50)})
    assert torch.equal(beside_a_prompt[2], together[2])
    for seq, span in decodes.items():
        assert torch.equal(attend(backend, qkv, blocks, {seq: span})[seq], decoded[seq])
        assert torch.equal(beside_a_prompt[seq], decoded[seq])


def test_a_prompt_in_chunks_is_close_to_the_whole() -> None:
    spec = make_spec(windows=(None,))
    qkv, blocks = random_steps(spec, 1, 140)
    backend = TritonAttention(spec)
    backend.allocate(1 + blocks.numel())
    whole = attend(backend, qkv, blocks, {0: slice(0, 140)})[0]
    bounds = [0, 64, 65, 140]
    chunks = [attend(backend, qkv, blocks, {0: slice(*bound)})[0] for bound in itertools.pairwise(bounds)]
    torch.testing.assert_close(torch.cat(chunks), whole, atol=1e-5, rtol=1e-5)


# --- the cache


@pytest.mark.parametrize("cache_dtype", [F16, INT8, E4M3, E5M2])
def test_stores_what_the_definition_rounds_to_and_skips_negative_slots(cache_dtype: torch.dtype) -> None:
    spec = make_spec(num_heads=6, num_kv_heads=3, head_dim=80, dtype=F16, kv_cache_dtype=cache_dtype, windows=(None,))
    backend = TritonAttention(spec)
    cache = backend.allocate(3)
    packed = (torch.randn(5, 6, 80) * 2.0 ** torch.randint(-9, 9, (5, 6, 1))).half()
    packed[0, 0] = 0.0
    k, v = packed.split(3, dim=1)  # as they lie behind the queries
    slots = np.array([17, -1, 0, 47, -1])
    one = np.array([0, 5], np.int32)
    backend.prepare(AttentionMetadata.from_host(one, np.array([5], np.int32), np.array([[1]], np.int32), slots))
    backend.write_kv(0, k, v)
    expected = [torch.zeros_like(tensor) for tensor in (cache.keys[0], cache.values[0])]
    scales = [torch.zeros(3, 16, 3) for _ in "kv"]
    stored = slots >= 0
    for x, numbers, scale in zip((k, v), expected, scales, strict=True):
        new = x[stored]
        if spec.has_scales:
            new, scale.flatten(0, 1)[slots[stored]] = rounded(new, cache_dtype)
        numbers.flatten(0, 1)[slots[stored]] = new
    assert torch.equal(cache.keys[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(cache.values[0].view(torch.uint8), expected[1].view(torch.uint8))
    if spec.has_scales:
        assert torch.equal(torch.stack((cache.key_scales[0], cache.value_scales[0])), torch.stack(scales))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_rounded_values_may_be_small(dtype: torch.dtype) -> None:
    """Scales of about 1e-6: times probabilities, they are too small for float16."""
    spec = make_spec(num_heads=3, num_kv_heads=1, windows=(None,), block_size=64, dtype=dtype, kv_cache_dtype=INT8)
    (q, k, v), blocks = random_steps(spec, 1, 500)
    small = v / 2**14
    expected = dense(q[0, -1:].float(), k[0].float(), small[0].float(), None, 0.3)
    backend = TritonAttention(spec)
    cache = backend.allocate(1 + blocks.numel())
    slots = step_metadata(spec, blocks, [slice(0, 500)]).slot_mapping
    stored = ((cache.keys, cache.key_scales, k), (cache.values, cache.value_scales, small))
    for numbers, scales, x in stored:
        numbers[0].flatten(0, 1)[slots], scales[0].flatten(0, 1)[slots] = rounded(x[0], INT8)
    backend.prepare(step_metadata(spec, blocks, [slice(499, 500)]))
    error = (backend.forward(0, q[0, -1:]).float() - expected).norm() / expected.norm()
    assert error < 2e-2


def test_tiles_before_the_window_are_not_read() -> None:
    spec = make_spec(num_heads=3, num_kv_heads=1, windows=(70,), block_size=64)
    qkv, blocks = random_steps(spec, 1, 280)
    backend = TritonAttention(spec)
    cache = backend.allocate(1 + blocks.numel())
    attend(backend, qkv, blocks, {0: slice(0, 270)})
    chunk, decode = slice(270, 280), slice(279, 280)
    expected = [attend(backend, qkv, blocks, {0: span})[0] for span in (chunk, decode)]
    for tensor in (cache.keys[0], cache.values[0]):
        tensor[blocks[0, :2]] = torch.nan  # positions 0 to 127; the first query's window begins with 201
    for span, out in zip((chunk, decode), expected, strict=True):
        assert torch.equal(attend(backend, qkv, blocks, {0: span})[0], out)


# --- graphs


def test_padded_rows_are_zero_and_disturb_nobody() -> None:
    """As a CUDA graph of a decode step has them: one query, no length, no slot, blocks of 0."""
    spec = make_spec(windows=(None,))
    qkv, blocks = random_steps(spec, 2, 50)
    backend = TritonAttention(spec)
    cache = backend.allocate(1 + blocks.numel())
    attend(backend, qkv, blocks, {0: slice(0, 49), 1: slice(0, 20)})
    expected = attend(backend, qkv, blocks, {0: slice(49, 50), 1: slice(20, 21)})
    for tensor in (cache.keys[0], cache.values[0]):
        tensor[0] = torch.nan
    last = [torch.cat((x[0, 49:50], x[1, 20:21], torch.full_like(x[0, :6], torch.nan))) for x in qkv]
    table = torch.cat((blocks, torch.zeros(6, blocks.shape[1], dtype=torch.long))).int().numpy()
    slots = np.array(
        [*(int(row[at // 16]) * 16 + at % 16 for row, at in zip(blocks, (49, 20), strict=True)), *[-1] * 6]
    )
    lens = np.array([50, 21, 0, 0, 0, 0, 0, 0], np.int32)
    backend.prepare(AttentionMetadata.from_host(np.arange(9, dtype=np.int32), lens, table, slots))
    out = backend.run(0, *last)
    assert torch.equal(out[:2], torch.cat((expected[0], expected[1])))
    assert not out[2:].any()


def test_a_larger_batch_leaves_the_workspace_of_captured_graphs_alone() -> None:
    backend = TritonAttention(make_spec())
    backend.allocate(9)

    def prepare(num_seqs: int) -> None:
        numbers = np.arange(num_seqs + 1, dtype=np.int32)
        backend.prepare(AttentionMetadata.from_host(numbers, numbers[1:], numbers[:-1, None], np.arange(num_seqs)))

    prepare(3)
    captured = backend._workspaces[-1]
    prepare(4)
    assert backend._workspaces == [captured]
    prepare(5)
    assert len(backend._workspaces) == 2
    assert backend._workspaces[0] is captured


# --- what it serves


def test_reasons() -> None:
    def reasons(**changes: object) -> str:
        return "; ".join(TritonAttention.unsupported(make_spec(**changes)))

    cuda = torch.device("cuda")
    assert not reasons()
    assert not reasons(device=cuda, capability=(8, 0), kv_cache_dtype=E5M2)
    assert not reasons(device=cuda, capability=(9, 0), kv_cache_dtype=E4M3)
    assert "capability 8.0, not 7.5" in reasons(device=cuda, capability=(7, 5))
    assert "float8_e4m3 cache needs compute capability 8.9" in reasons(
        device=cuda, capability=(8, 6), kv_cache_dtype=E4M3
    )
    assert "float64" in reasons(dtype=torch.float64)
    assert "no cache of torch.float16" in reasons(kv_cache_dtype=F16)
    assert "at most 256 dimensions, not 512" in reasons(head_dim=512)
    assert "at most 128 query heads" in reasons(num_heads=129, num_kv_heads=1)


def test_needs_a_gpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert TritonAttention.unsupported(make_spec()) == ["it needs a CUDA device, not cpu"]


# --- models


def test_logits_of_a_model(tmp_path: Path) -> None:
    write_tiny(tmp_path, "mistral", sliding_window=20, num_hidden_layers=2)
    decoder = load(tmp_path)
    prompts = random_prompts(3, lengths=(5, 60))
    runs = [PagedRun(decoder, prompts), PagedRun(decoder, prompts, TritonAttention)]
    for step in (
        {0: prompts[0], 1: prompts[1][:4]},
        {0: [9], 1: prompts[1][4:], 2: prompts[2]},
        {2: [5], 0: [3], 1: [7]},
    ):
        expected, logits = (run.step(step) for run in runs)
        for seq in step:
            torch.testing.assert_close(logits[seq], expected[seq], atol=2e-4, rtol=1e-4)


def test_tokens_of_an_engine(tmp_path: Path) -> None:
    write_tiny(tmp_path, num_hidden_layers=2)
    prompts, params = random_prompts(3, lengths=(5, 40)), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    settings = {"max_num_batched_tokens": 32}
    expected, tokens = (
        token_ids(make_core(tmp_path, attention_backend=backend, **settings), prompts, params)
        for backend in ("torch_reference", "triton")
    )
    assert tokens == expected


def test_head_sizes_and_caches_that_no_other_test_has() -> None:
    for head_dim, cache_dtype in ((8, None), (40, INT8), (112, None)):
        spec = replace(make_spec(), head_dim=head_dim, kv_cache_dtype=cache_dtype)
        assert run_steps(TritonAttention(spec), spec, [[20, 3], [1, 1]]) < 2e-5
