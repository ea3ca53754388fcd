"""The C++ kernels against their torch twins: odd sizes, poisoned memory, and the same bits in any batch."""

import subprocess
import sys

import pytest
import torch

from engine.attention.cpu import CPUAttention
from engine.attention.metadata import AttentionMetadata, AttentionSpec
from engine.attention.torch_reference import TorchReferenceAttention
from engine.kernels.cpu import build
from engine.kernels.cpu.ops import CPUOps
from engine.kernels.ops import LayerWeights, each_layer
from engine.kernels.torch_ops import TorchOps
from engine.models.config import LayerForm

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


CLASSIC = ("input_norm", "post_attention_norm")
OUTPUTS = ("attention_output_norm", "mlp_output_norm")
BIASED = ("input_norm_bias", "post_attention_norm_bias")


def make_layer(ops, shape, dtype, *, bias=False, qk_norm=False, norms=CLASSIC):
    hidden, intermediate, heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def linear(name, rows, columns):
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        offset = torch.randn(rows, generator=generator) if bias else None
        return ops.pack(name, weight.to(dtype), None if offset is None else offset.to(dtype))

    def norm(size):
        return torch.rand(size, generator=generator).add(0.5).to(dtype)

    layer = LayerWeights(
        **{name: norm(hidden) for name in norms},
        qkv=linear("qkv", (heads + 2 * kv_heads) * head_dim, hidden),
        q_norm=norm(head_dim * (heads if qk_norm == "full" else 1)) if qk_norm else None,
        k_norm=norm(head_dim * (kv_heads if qk_norm == "full" else 1)) if qk_norm else None,
        output=linear("output", hidden, heads * head_dim),
        gate_up=linear("gate_up", (2 if ops.form.is_gated else 1) * intermediate, hidden),
        down=linear("down", hidden, intermediate),
    )
    return ops.bind(layer)


def both_ops(shape, dtype, **form):
    sizes = {"num_heads": shape[2], "num_kv_heads": shape[3], "head_dim": shape[4], "norm_eps": 1e-5}
    sizes["form"] = LayerForm(**form)
    return TorchOps(**sizes), CPUOps(**sizes, dtype=dtype)


def assert_near(actual, expected, dtype):
    bound = TOLERANCE[dtype] * max([1.0, *expected.float().abs().flatten().tolist()])
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7, 61])
@pytest.mark.parametrize(
    ("form", "norms"),
    [
        ({"activation": "gelu_tanh"}, (*CLASSIC, *OUTPUTS)),
        ({"activation": "gelu"}, OUTPUTS),
        ({"layer_norm": True, "is_parallel": True}, CLASSIC),
        ({"layer_norm": True, "is_parallel": True, "activation": "gelu"}, (*CLASSIC, *BIASED)),
        ({"layer_norm": True, "is_gated": False, "activation": "relu"}, (*CLASSIC, *BIASED)),
        ({"is_gated": False, "activation": "relu2"}, CLASSIC),
    ],
    ids=str,
)
def test_forms_of_a_layer_equal_their_torch_twins(form, norms, num_tokens, dtype):
    shape = (72, 100, 4, 2, 16)  # neither the hidden nor the intermediate size is whole panels
    reference, ops = both_ops(shape, dtype, **form)
    layers = [make_layer(o, shape, dtype, bias=True, qk_norm="full", norms=norms) for o in (reference, ops)]
    hidden, cos_sin = torch.randn(num_tokens, shape[0]), torch.randn(num_tokens, shape[4])
    attention = torch.randn(num_tokens, 4, 16).to(dtype)
    twins = []
    for o, layer in zip((reference, ops), layers, strict=True):
        own = hidden.to(dtype) if o is reference else hidden.to(dtype).float()
        twins.append((*(x.clone() for x in o.attention_input(own, layer, cos_sin)),
                      o.attention_output(own, attention, layer)))  # fmt: skip
    for actual, expected in zip(twins[1], twins[0], strict=True):
        assert_near(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 6, 7, 23, 61])
@pytest.mark.parametrize(
    ("shape", "bias", "qk_norm"),
    [
        ((64, 96, 4, 2, 16), False, False),
        ((72, 100, 3, 1, 18), True, False),  # nothing a multiple of 16
        ((40, 24, 2, 2, 32), True, True),
    ],
)
def test_layer_operations_equal_their_torch_twins(shape, bias, qk_norm, num_tokens, dtype):
    reference, ops = both_ops(shape, dtype)
    hidden = torch.randn(num_tokens, shape[0]).to(dtype)
    angles = torch.rand(num_tokens, shape[4] // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    expected_layer, layer = (make_layer(o, shape, dtype, bias=bias, qk_norm=qk_norm) for o in (reference, ops))

    expected = reference.attention_input(hidden, expected_layer, cos_sin)
    for actual, wanted in zip(ops.attention_input(hidden.float(), layer, cos_sin), expected, strict=True):
        assert_near(actual, wanted, dtype)

    attention = torch.randn(num_tokens, shape[2], shape[4]).to(dtype)
    wanted = reference.attention_output(hidden, attention, expected_layer)
    assert_near(ops.attention_output(hidden.float(), attention, layer), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_head_embeds_as_a_table_does(dtype):
    reference, ops = both_ops((72, 100, 3, 1, 18), dtype)
    table, token_ids = torch.randn(37, 71).to(dtype), torch.tensor([36, 0, 5, 5, 16, 15])
    head = ops.pack("head", table, None)
    assert torch.equal(ops.embed(token_ids, head), reference.embed(token_ids, table).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(0, 40), (1, 50), (3, 16), (30, 129)])
def test_logits_equal_their_torch_twin(rows, vocab, dtype):
    reference, ops = both_ops((72, 100, 3, 1, 18), dtype)
    hidden, norm = torch.randn(rows, 72).to(dtype), torch.rand(72).to(dtype)
    weight = torch.randn(vocab, 72).to(dtype)
    wanted = reference.logits(hidden, norm, reference.pack("head", weight, None))
    assert_near(ops.logits(hidden.float(), norm, ops.pack("head", weight, None)), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype):
    shape = (64, 96, 4, 2, 16)
    _, ops = both_ops(shape, dtype)
    layer = make_layer(ops, shape, dtype)
    hidden, cos_sin = torch.randn(70, 64), torch.randn(70, 16)
    attention = torch.randn(70, 4, 16).to(dtype)
    together = [x.clone() for x in ops.attention_input(hidden.clone(), layer, cos_sin)]
    together.append(ops.attention_output(hidden.clone(), attention, layer))
    for first, last in ((0, 1), (3, 10), (50, 70)):
        rows = slice(first, last)
        alone = [x.clone() for x in ops.attention_input(hidden[rows].clone(), layer, cos_sin[rows].contiguous())]
        alone.append(ops.attention_output(hidden[rows].clone(), attention[rows].contiguous(), layer))
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a, b[rows])


def test_not_a_number_stays_in_its_row():
    shape = (64, 96, 4, 2, 16)
    _, ops = both_ops(shape, torch.float32)
    layer = make_layer(ops, shape, torch.float32)
    hidden, attention = torch.randn(9, 64), torch.randn(9, 4, 16)
    hidden[4, 7] = float("nan")
    out = ops.attention_output(hidden, attention, layer)
    assert out.isnan().any(dim=1).tolist() == [row == 4 for row in range(9)]


def rounded(x):
    """Keys or values [tokens, heads, head_dim] as a cache of 8-bit integers keeps them."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round() * scale


class Cache:
    """A backend with a cache full of NaN, and sequences whose blocks lie in random order."""

    def __init__(self, backend_class, spec, seq_lens):
        self.spec = spec
        self.backend = backend_class(spec)
        blocks = [-(-length // spec.block_size) for length in seq_lens]
        cache = self.backend.allocate(sum(blocks) + 1)
        for tensor in (*cache.keys, *cache.values):
            tensor.view(torch.uint8).fill_(255)  # NaN in every type that has one
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)).int() + 1
        self.table = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
        for row, ids in zip(self.table, order.split(blocks), strict=True):
            row[: len(ids)] = ids

    def run(self, q, k, v, starts, query_lens):
        self.prepare(starts, query_lens)
        return self.backend.run(0, q, k, v).clone()

    def prepare(self, starts, query_lens):
        lens = torch.tensor(query_lens)
        sequence = torch.repeat_interleave(torch.arange(len(lens)), lens)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, query_lens, strict=True)])
        size = self.spec.block_size
        ends = lens.cumsum(0)
        self.backend.prepare(
            AttentionMetadata.from_host(
                query_start_loc=torch.cat((torch.zeros(1), ends)).int().numpy(),
                seq_lens=((torch.tensor(starts) + lens).int()).numpy(),
                block_table=self.table.numpy(),
                slot_mapping=(self.table[sequence, positions // size].long() * size + positions % size).numpy(),
            )
        )


def attention_case(
    backend_class, dtype, *, heads=(6, 2), head_dim=32, block_size=16, window=None, softcap=0.0, kv=None
):
    """Output of a step with three sequences: a chunk behind a long context, a whole prompt, a decode."""
    before, now = [600, 0, 70], [41, 37, 1]
    spec = AttentionSpec(*heads, head_dim, dtype, torch.device("cpu"), block_size, (window,), 0.3, softcap, kv)
    total = [b + n for b, n in zip(before, now, strict=True)]
    cache, generator = Cache(backend_class, spec, total), torch.Generator().manual_seed(2)
    tensors = [torch.randn(sum(total), n, head_dim, generator=generator).to(dtype) for n in (heads[0], *[heads[1]] * 2)]

    if kv is not None and backend_class is TorchReferenceAttention:
        tensors[1:] = [rounded(x).to(dtype) for x in tensors[1:]]

    def part(first, last):
        split = [x.split(total) for x in tensors]
        return [torch.cat([s[a:b] for s, a, b in zip(x, first, last, strict=True)]).contiguous() for x in split]

    filled = [i for i, n in enumerate(before) if n]
    table, cache.table = cache.table, cache.table[filled].contiguous()
    cache.run(*part([0] * 3, before), [0] * len(filled), [before[i] for i in filled])
    cache.table = table
    return cache.run(*part(before, total), before, now)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"heads": (8, 1), "head_dim": 16},
        {"heads": (4, 4), "head_dim": 80, "block_size": 32},
        {"heads": (9, 3), "head_dim": 64, "window": 33},
        {"heads": (64, 1), "head_dim": 16, "window": 600},  # more heads than rows of a unit
        {"head_dim": 256, "window": 1},
        {"softcap": 2.0, "window": 100},
        {"head_dim": 64, "softcap": 50.0},
        {"kv": torch.int8},
        {"kv": torch.int8, "heads": (9, 3), "head_dim": 64, "window": 33},
        {"kv": torch.int8, "heads": (4, 4), "head_dim": 80, "block_size": 32, "softcap": 5.0},
    ],
    ids=str,
)
def test_paged_attention_equals_the_reference(case, dtype):
    expected = attention_case(TorchReferenceAttention, dtype, **case)
    actual = attention_case(CPUAttention, dtype, **case)
    assert not actual.isnan().any()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", [None, torch.int8])
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_has_the_same_bits_in_any_chunk(dtype, window, kv):
    length = 1100
    spec = AttentionSpec(6, 2, 32, dtype, torch.device("cpu"), 16, (window,), 0.3, kv_cache_dtype=kv)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(length, n, 32, generator=generator).to(dtype) for n in (6, 2, 2))
    whole = Cache(CPUAttention, spec, [length]).run(q, k, v, [0], [length])
    chunked, start = Cache(CPUAttention, spec, [length]), 0
    for chunk in (1, 16, 17, 500, 63, 502, 1):
        rows = slice(start, start + chunk)
        assert torch.equal(chunked.run(q[rows], k[rows], v[rows], [start], [chunk]), whole[rows])
        start += chunk
    assert start == length


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 700])
def test_the_result_has_the_same_bits_however_many_threads_share_the_keys(dtype, window):
    lengths, query_lens = [1500, 40, 700, 3000], [1, 30, 20, 1]
    spec = AttentionSpec(6, 2, 32, dtype, torch.device("cpu"), 16, (window,), 0.3)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(sum(query_lens), n, 32, generator=generator).to(dtype) for n in (6, 2, 2))
    starts = [length - n for length, n in zip(lengths, query_lens, strict=True)]
    results, shared = [], []
    for num_threads in (1, 2, 3, 5):
        cache = Cache(CPUAttention, spec, lengths)
        for tensor in (*cache.backend.cache.keys, *cache.backend.cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)))
        cache.backend.num_threads = num_threads
        cache.backend.partials = torch.full((64, cache.backend.partials.shape[1]), float("nan"))
        results.append(cache.run(q, k, v, starts, query_lens))
        shared.append(cache.backend.steps[window].num_merges)
    assert shared[0] == 0
    assert min(shared[1:]) > 0
    assert not results[0].isnan().any()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_in_a_rounded_cache_stays_in_its_sequence(dtype):
    spec = AttentionSpec(2, 1, 32, dtype, torch.device("cpu"), 16, (None,), 0.3, kv_cache_dtype=torch.int8)
    q, k, v = (torch.randn(9, n, 32).to(dtype) for n in (2, 1, 1))
    k[2, 0, 7], v[7, 0, 5] = float("nan"), float("inf")
    out = Cache(CPUAttention, spec, [3, 3, 3]).run(q, k, v, [0, 0, 0], [3, 3, 3])
    assert out[[2, 7, 8]].isnan().flatten(1).any(1).all()
    assert not out[3:6].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [3, 60])
def test_all_layers_in_one_call_are_the_layers_one_by_one(dtype, num_tokens):
    shape, windows = (64, 96, 4, 2, 16), (None, 5, None)
    _, ops = both_ops(shape, dtype)
    layers = [make_layer(ops, shape, dtype, bias=True, qk_norm=True) for _ in windows]
    spec = AttentionSpec(*shape[2:], dtype, torch.device("cpu"), 16, windows, 0.25)
    cache = Cache(CPUAttention, spec, [num_tokens])
    cache.prepare([0], [num_tokens])
    angles = torch.rand(num_tokens, shape[4] // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)[None]
    hidden = torch.randn(num_tokens, shape[0])
    for wanted in ([], [num_tokens - 1], [0, 2], list(range(num_tokens))):
        arguments = (layers, cos_sin, torch.tensor(wanted, dtype=torch.int64), cache.backend)
        expected = each_layer(ops, hidden.clone(), *arguments).clone()
        assert torch.equal(ops.run_layers(hidden.clone(), *arguments), expected)
        assert len(expected) == len(wanted)


@pytest.mark.parametrize("window", [None, 100])
def test_decodes_grow_over_the_borders_of_splits(window):
    """A plan is kept from step to step; keys come into a new split, and leave the window's oldest one."""
    starts, generator = [250, 350, 1], torch.Generator().manual_seed(6)
    spec = AttentionSpec(6, 2, 32, torch.float32, torch.device("cpu"), 16, (window,), 0.3)
    caches = [
        Cache(backend, spec, [start + 13 for start in starts]) for backend in (CPUAttention, TorchReferenceAttention)
    ]
    filled = [torch.randn(sum(starts), n, 32, generator=generator) for n in (6, 2, 2)]
    for cache in caches:
        cache.run(*filled, [0, 0, 0], starts)
    for step in range(12):
        now = [torch.randn(3, n, 32, generator=generator) for n in (6, 2, 2)]
        actual, expected = (cache.run(*now, [start + step for start in starts], [1, 1, 1]) for cache in caches)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_the_same_whoever_takes_its_panels(dtype):
    """More threads than cores: some have not begun when others look for work."""
    shape, results = (64, 400, 4, 2, 16), []
    hidden, attention = torch.randn(5, shape[0]), torch.randn(5, shape[2], shape[4]).to(dtype)
    for num_threads in (1, *[7] * 30):
        _, ops = both_ops(shape, dtype)
        ops.num_threads = num_threads
        layer = make_layer(ops, shape, dtype, bias=True)
        results.append(ops.attention_output(hidden.clone(), attention, layer))
    assert all(torch.equal(result, results[0]) for result in results)


def test_one_stream_is_shared_evenly():
    """Three key heads on two threads: the middle one is cut in two."""
    spec = AttentionSpec(9, 3, 64, torch.bfloat16, torch.device("cpu"), 16, (None,), 0.3)
    cache = Cache(CPUAttention, spec, [8000])
    cache.backend.num_threads = 2
    cache.run(*(torch.zeros(1, n, 64, dtype=torch.bfloat16) for n in (9, 3, 3)), [7999], [1])
    plan = cache.backend.keep_alive[1][None]
    assert plan.first_part.tolist() == [0, 48, 96]
    assert plan.merges.tolist() == [1]
    assert plan.num_slots == 32


def test_what_the_kernels_cannot_do_is_said():
    spec = AttentionSpec(2, 1, 24, torch.float16, torch.device("cpu"), 8, (None,), 0.3)
    reasons = "; ".join(CPUAttention.unsupported(spec))
    assert all(word in reasons for word in ("float16", "head_dim 24", "block_size 8"))


def test_without_a_compiler_the_reason_and_the_mend_are_said(tmp_path):
    script = (
        "import torch; from engine.kernels import select_ops; from engine.models.config import ModelConfig, RopeConfig;"
        "config = ModelConfig(architecture='x', vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1,"
        " num_heads=1, num_kv_heads=1, head_dim=8, max_position_embeddings=8, rms_norm_eps=1e-5, rope=RopeConfig(),"
        " tie_word_embeddings=True);"
        "ops, notes = select_ops(config, torch.device('cpu'), torch.float32); print(type(ops).__name__, notes)"
    )
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("TorchOps")
    assert "install g++" in done.stdout


def test_a_broken_compiler_is_reported_and_leaves_nothing_behind(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'unknown option' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.KernelsUnavailable, match="unknown option"):
        build._compile(tmp_path / "kernels.so")
    assert [path.name for path in tmp_path.iterdir()] == ["g++"]
