"""The Triton layer operations against their torch twins, and whole networks against transformers."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.attention.metadata import AttentionMetadata, AttentionSpec
from engine.attention.torch_reference import TorchReferenceAttention
from engine.checkpoints import open_checkpoint
from engine.kernels import select_ops
from engine.kernels.ops import LayerWeights, each_layer
from engine.kernels.torch_ops import ACTIVATIONS, TorchLinear, TorchOps, rotate
from engine.models.config import LayerForm, ModelConfig, RopeConfig
from tests.engine.paged_runs import PagedRun, load
from tests.engine.tiny_models import VOCAB_SIZE, write_tiny

pytest.importorskip("triton")

from engine.attention.triton_paged import TritonAttention
from engine.kernels.gpu.layers import KVStore, add_rms_norm, gated, rms_norm, rotate_and_store
from engine.kernels.gpu.ops import TritonOps, cache_slots

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative: two units in the last place; the interpreter cuts off where a GPU rounds to bfloat16."""
DTYPES = list(TOLERANCE)
OUTPUT_NORMS = ("attention_output_norm", "mlp_output_norm")
BIASES = ("input_norm_bias", "post_attention_norm_bias")
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32, apart: int = 0) -> Tensor:
    """[*shape], rows `apart` elements apart from each other."""
    numbers = torch.randn(*shape[:-1], shape[-1] + apart, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype)[..., : shape[-1]]


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    atol = TOLERANCE[dtype] * max([1.0, *expected.float().abs().flatten().tolist()]) / 2
    torch.testing.assert_close(actual.float(), expected.float(), rtol=TOLERANCE[dtype], atol=atol)


@settings(max_examples=25, deadline=None)
@given(dtypes, st.integers(0, 3), st.sampled_from([1, 8, 63, 64, 576, 2000, 16384]), st.integers(0, 9), seeds)
def test_norms_equal_their_torch_twin(dtype: torch.dtype, rows: int, size: int, apart: int, seed: int) -> None:
    reference = TorchOps(num_heads=1, num_kv_heads=1, head_dim=1, norm_eps=1e-3)
    x, delta = normal(seed, rows, size, dtype=dtype, apart=apart), normal(seed + 1, rows, size, dtype=dtype)
    weight = normal(seed + 2, size, dtype=dtype)
    assert_near(rms_norm(x, weight, 1e-3), reference._norm(x, weight), dtype)
    for residual in (x, x.float() * 3):
        total, normed = add_rms_norm(residual, delta, weight, 1e-3)
        assert torch.equal(total, residual.float() + delta.float())
        assert normed.dtype == dtype
        assert_near(normed, reference._norm(total, weight), dtype)


@np.errstate(over="ignore")
def activated(gate_up: Tensor, activation: str) -> Tensor:
    """Exponentials may be infinite on the way, of which the interpreter warns."""
    return gated(gate_up, activation)


@settings(max_examples=25, deadline=None)
@given(
    dtypes,
    st.integers(0, 3),
    st.sampled_from([1, 24, 100, 1024, 1025, 2500]),
    st.sampled_from(list(ACTIVATIONS)),
    st.integers(0, 9),
    seeds,
)
def test_activations_equal_their_torch_twin(
    dtype: torch.dtype, rows: int, size: int, activation: str, apart: int, seed: int
) -> None:
    gate_up = normal(seed, rows, 2 * size, dtype=dtype, apart=apart) * 4
    gate, up = gate_up.float().chunk(2, dim=1)
    assert_near(activated(gate_up, activation), ACTIVATIONS[activation](gate) * up, dtype)


def test_activations_of_great_numbers_are_finite() -> None:
    gates = torch.tensor([-1e30, -1e4, -100.0, 0.0, 100.0, 1e4])
    gate_up = torch.cat((gates, torch.ones(6)))[None]
    for activation in ("silu", "gelu", "gelu_tanh"):
        torch.testing.assert_close(activated(gate_up, activation)[0], gates.clamp(min=0.0), rtol=1e-6, atol=1e-30)


@settings(max_examples=30, deadline=None)
@given(
    dtypes,
    st.integers(0, 2),
    st.sampled_from([(1, 1), (4, 2), (9, 3), (14, 2), (6, 1), (40, 40)]),
    st.sampled_from([2, 18, 32, 64, 80, 96, 112, 128, 256]),
    st.booleans(),
    st.integers(0, 9),
    seeds,
)
def test_queries_keys_and_values_equal_their_torch_twins(
    dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int], head_dim: int, qk_norm: bool, apart: int, seed: int
) -> None:
    heads = (sizes[0], sizes[1], sizes[1])
    reference = TorchOps(num_heads=sizes[0], num_kv_heads=sizes[1], head_dim=head_dim, norm_eps=1e-3)
    qkv = normal(seed, num_tokens, sum(heads) * head_dim, dtype=dtype, apart=apart)
    cos_sin = normal(seed + 1, num_tokens, head_dim, apart=apart)
    norms = (normal(seed + 2, head_dim, dtype=dtype), normal(seed + 3, head_dim, dtype=dtype))
    k, v = (torch.empty(num_tokens, sizes[1], head_dim, dtype=dtype) for _ in "kv")
    q = rotate_and_store(qkv, cos_sin, norms if qk_norm else None, 1e-3, heads, KVStore(k, v))

    expected = qkv.float().reshape(num_tokens, sum(heads), head_dim).split(heads, dim=1)
    for actual, x, norm in zip((q, k), expected, norms, strict=False):
        assert_near(actual, rotate(reference._norm(x, norm.float()) if qk_norm else x, cos_sin), dtype)
    assert torch.equal(v.float(), expected[2])


HEADS, SLOTS = (6, 2, 2), [37, -1, 5, 16, -1]


def metadata(slots: list[int]) -> AttentionMetadata:
    """One sequence in block 1."""
    return AttentionMetadata.from_host(
        query_start_loc=np.array([0, len(slots)], np.int32),
        seq_lens=np.array([len(slots)], np.int32),
        block_table=np.array([[1]], np.int32),
        slot_mapping=np.array(slots, np.int64),
    )


def stored(
    qkv: Tensor, cos_sin: Tensor, norms: tuple[Tensor, Tensor] | None, cache_dtype: torch.dtype | None
) -> list[list[Tensor]]:
    """Queries and the whole cache behind a step, written together with the rotation, and by the backend."""
    dtype, head_dim, layer, results = qkv.dtype, cos_sin.shape[1], 1, []
    spec = AttentionSpec(*HEADS[:2], head_dim, dtype, torch.device("cpu"), 16, (None,) * 3, 1.0, 0.0, cache_dtype)
    for together in (True, False):
        backend = TorchReferenceAttention(spec)
        cache = backend.allocate(3)
        backend.prepare(metadata(SLOTS))
        k, v = (torch.empty(len(qkv), HEADS[1], head_dim, dtype=dtype) for _ in "kv")
        store = cache_slots(backend, layer) if together else KVStore(k, v)
        q = rotate_and_store(qkv, cos_sin, norms, 1e-3, HEADS, store)
        if not together:
            backend.write_kv(layer, k, v)
        results.append([q, *cache.keys, *cache.values, *cache.key_scales, *cache.value_scales])
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("head_dim", [18, 64])
def test_a_cache_written_with_the_rotation_has_the_bits_of_one_written_by_the_backend(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, head_dim: int
) -> None:
    qkv, cos_sin = normal(0, 5, sum(HEADS) * head_dim, dtype=dtype), normal(1, 5, head_dim)
    qkv[2, HEADS[0] * head_dim :] = 0.0  # keys and values whose scale is 0
    together, apart = stored(qkv, cos_sin, (normal(2, head_dim, dtype=dtype),) * 2, cache_dtype)
    assert together[2].flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist() == [16, 37]
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_float8_cache_written_with_the_rotation_has_the_bits_of_one_written_by_the_backend(
    cache_dtype: torch.dtype,
) -> None:
    """With numbers that are of the type, for the interpreter does not round to it as a GPU does; so scales are 1."""
    greatest = torch.finfo(cache_dtype).max
    qkv = normal(0, 5 * sum(HEADS), 32).to(cache_dtype).bfloat16()
    qkv[:, 3] = greatest
    cos_sin = torch.cat((torch.ones(5, 16), torch.zeros(5, 16)), dim=1)
    for a, b in zip(*stored(qkv.view(5, -1), cos_sin, None, cache_dtype), strict=True):
        assert torch.equal(a.float(), b.float())


def ops_of(config: ModelConfig) -> TritonOps:
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.form)
    return TritonOps(**dict(zip(("num_heads", "num_kv_heads", "head_dim", "norm_eps", "form"), sizes, strict=True)))


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"num_attention_heads": 6, "head_dim": 18}),
    ("qwen3", {"head_dim": 32}),
    ("gemma2", {"head_dim": 32, "sliding_window": 4, "final_logit_softcapping": 3.0}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ("granite", {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.1}),
    ("phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.75}),
    ("olmo2", {}),
    ("glm4", {"pad_token_id": 0, "head_dim": 32}),
    ("cohere2", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ("starcoder2", {"sliding_window": None}),
    ("arcee", {}),
    ("mistral", {"sliding_window": 4}),
]


@pytest.mark.parametrize(
    ("family", "config", "backend"),
    [*((*family, TorchReferenceAttention) for family in FAMILIES), (*FAMILIES[-1], TritonAttention)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_families_equal_transformers_in_mixed_steps(
    tmp_path: Path, family: str, config: dict[str, Any], backend: type
) -> None:
    model = write_tiny(tmp_path, family, num_hidden_layers=2, **config)
    decoder = load(tmp_path, ops=ops_of(open_checkpoint(tmp_path).config))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (13, 6, 3)]
    run, got = PagedRun(decoder, prompts, backend), [[], [], []]
    for sizes in [(9, 5, 2), (4, 1, 1)]:
        chunks = {seq: prompts[seq][run.computed[seq] :][:size] for seq, size in enumerate(sizes) if size}
        for seq, logits in run.step(chunks).items():
            got[seq].append(logits)
    for prompt, logits in zip(prompts, got, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        assert (torch.cat(logits) - expected).abs().max() < 1e-4


def tiny_layers(ops: TorchOps, dtype: torch.dtype, qk_norm: bool) -> list[LayerWeights]:
    """Two layers: hidden size 40, intermediate size 24, 4 heads and 2 key heads of 18."""

    def linear(seed: int, rows: int, columns: int) -> Any:
        weight = normal(seed, rows, columns, dtype=dtype) / columns**0.5
        return ops.pack("", weight, normal(seed + 1, rows, dtype=dtype))

    return [
        LayerWeights(
            input_norm=normal(seed, 40, dtype=dtype),
            qkv=linear(seed + 2, 8 * 18, 40),
            q_norm=normal(seed + 4, 18, dtype=dtype) if qk_norm else None,
            k_norm=normal(seed + 5, 18, dtype=dtype) if qk_norm else None,
            output=linear(seed + 6, 40, 4 * 18),
            post_attention_norm=normal(seed + 8, 40, dtype=dtype),
            gate_up=linear(seed + 10, 48, 40),
            down=linear(seed + 12, 40, 24),
        )
        for seed in (0, 20)
    ]


def tiny_backend(dtype: torch.dtype, num_tokens: int, cache_dtype: torch.dtype | None) -> TorchReferenceAttention:
    spec = AttentionSpec(4, 2, 18, dtype, torch.device("cpu"), 16, (None, 3), 0.2, 0.0, cache_dtype)
    backend = TorchReferenceAttention(spec)
    backend.allocate(2)
    backend.prepare(metadata(list(range(16, 16 + num_tokens))))
    return backend


SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 18, "norm_eps": 1e-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_layers_two_operations_equal_their_torch_twins(dtype: torch.dtype, qk_norm: bool) -> None:
    reference, ops = TorchOps(**SIZES), TritonOps(**SIZES)
    layer, hidden, cos_sin = tiny_layers(ops, dtype, qk_norm)[0], normal(7, 3, 40, dtype=dtype), normal(8, 3, 18)
    attention = normal(9, 3, 4, 18, dtype=dtype)
    twins = [(*o.attention_input(hidden, layer, cos_sin), o.attention_output(hidden, attention, layer))
             for o in (ops, reference)]  # fmt: skip
    for actual, expected in zip(*twins, strict=True):
        bound = 4 * TOLERANCE[dtype] * float(expected.float().abs().max())
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "norms"),
    [
        ({"activation": "gelu_tanh"}, ("input_norm", "post_attention_norm", *OUTPUT_NORMS)),
        ({}, OUTPUT_NORMS),
        ({"layer_norm": True, "is_parallel": True}, ("input_norm", "post_attention_norm", *BIASES)),
        ({"layer_norm": True, "is_gated": False, "activation": "relu2"}, ("input_norm", "post_attention_norm")),
    ],
    ids=str,
)
def test_forms_of_a_layer_equal_their_torch_twins(
    form: dict[str, Any], norms: tuple[str, ...], dtype: torch.dtype
) -> None:
    """bfloat16 too: what is added to the residual stream is rounded, the stream is not."""
    reference, ops = (kind(**SIZES, form=LayerForm(**form)) for kind in (TorchOps, TritonOps))
    own = {name: normal(seed, 40, dtype=dtype) for seed, name in enumerate(norms, 50)}
    full = {"q_norm": normal(60, 4 * 18, dtype=dtype), "k_norm": normal(61, 2 * 18, dtype=dtype)}
    classic = dict.fromkeys(("input_norm", "post_attention_norm"))
    layer = replace(tiny_layers(ops, dtype, False)[0], **classic | own | full)
    if not ops.form.is_gated:
        layer = replace(layer, gate_up=TorchLinear(normal(62, 24, 40, dtype=dtype), None))
    hidden, cos_sin = normal(7, 3, 40, dtype=dtype), normal(8, 3, 18)
    attention = normal(9, 3, 4, 18, dtype=dtype)
    for actual, expected in zip(
        (*ops.attention_input(hidden, layer, cos_sin), ops.attention_output(hidden, attention, layer)),
        (*reference.attention_input(hidden, layer, cos_sin), reference.attention_output(hidden, attention, layer)),
        strict=True,
    ):
        bound = 4 * TOLERANCE[dtype] * float(expected.float().abs().max())
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=bound)
    assert ops.attention_output(hidden, attention, layer).dtype == torch.float32


class NotPaged:
    """A backend whose cache is its own affair."""

    def __init__(self, backend: TorchReferenceAttention) -> None:
        self.run = backend.run


@pytest.mark.parametrize(("wanted", "cache_dtype"), [([], None), ([0, 2], None), ([0, 1, 2], torch.int8)], ids=str)
def test_all_layers_are_the_layers_one_by_one(wanted: list[int], cache_dtype: torch.dtype | None) -> None:
    ops, dtype = TritonOps(**SIZES), torch.bfloat16
    layers, hidden, cos_sin = tiny_layers(ops, dtype, True), normal(7, 3, 40, dtype=dtype), normal(8, 1, 3, 18)
    rows, results = torch.tensor(wanted, dtype=torch.int64), []
    one_by_one = tiny_backend(dtype, 3, cache_dtype)
    expected = each_layer(ops, hidden, layers, cos_sin, rows, one_by_one)
    assert expected.shape == (len(wanted), 40)
    for backend in (paged := tiny_backend(dtype, 3, cache_dtype), NotPaged(tiny_backend(dtype, 3, cache_dtype))):
        results.append(ops.run_layers(hidden, layers, cos_sin, rows, backend))
    assert torch.equal(results[0], expected)
    assert torch.equal(results[1], expected)
    assert all(torch.equal(a, b) for a, b in zip(paged.cache.keys, one_by_one.cache.keys, strict=True))
    logits = ops.logits(expected, layers[0].input_norm, ops.pack("head", normal(9, 11, 40, dtype=dtype), None))
    assert logits.shape == (len(wanted), 11)
    assert logits.dtype == torch.float32


def test_logits_on_a_gpu_are_not_rounded_to_the_weights_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types and shapes only, of tensors that are nowhere."""
    ops = TritonOps(**SIZES)
    monkeypatch.setattr(ops, "_norm", lambda x, weight: x.to(weight.dtype))
    monkeypatch.setattr(TorchOps, "logits", None)
    with FakeTensorMode():
        hidden = torch.empty(3, 40, device="cuda")
        norm, weight = (torch.empty(*shape, 40, device="cuda", dtype=torch.bfloat16) for shape in ((), (11,)))
        logits = ops.logits(hidden, norm, TorchLinear(weight, None))
    assert (logits.shape, logits.dtype) == ((3, 11), torch.float32)


def test_a_token_has_the_same_bits_alone_and_in_a_batch_between_the_products() -> None:
    x, delta, weight = normal(0, 4, 600), normal(1, 4, 600), normal(2, 600)
    qkv, cos_sin = normal(3, 4, 8 * 18), normal(4, 4, 18)
    k, v = torch.empty(4, 2, 18), torch.empty(4, 2, 18)

    def all_of(rows: slice) -> list[Tensor]:
        q = rotate_and_store(
            qkv[rows], cos_sin[rows], (weight[:18], weight[:18]), 1e-5, (4, 2, 2), KVStore(k[rows], v[rows])
        )
        return [q, k[rows].clone(), *add_rms_norm(x[rows], delta[rows], weight, 1e-5), gated(x[rows])]

    together = all_of(slice(0, 4))
    for row in range(4):
        for alone, batch in zip(all_of(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone, batch[row : row + 1])


def test_not_a_number_stays_in_its_row() -> None:
    ops = TritonOps(**SIZES)
    layer, hidden = tiny_layers(ops, torch.float32, True)[0], normal(0, 4, 40)
    hidden[2, 3] = torch.nan
    q, k, v = ops.attention_input(hidden, layer, normal(1, 4, 18))
    for out in (q, k, v, ops.attention_output(hidden, normal(2, 4, 4, 18), layer)):
        assert out.isnan().flatten(1).any(1).tolist() == [False, False, True, False]


MODEL = ModelConfig(
    architecture="x",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)


def test_gpus_get_the_kernels_or_a_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def selected(capability: tuple[int, int]) -> tuple[type, list[str]]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        ops, notes = select_ops(MODEL, torch.device("cuda"), torch.bfloat16)
        return type(ops), notes

    assert selected((8, 0)) == (TritonOps, [])
    assert selected((10, 0)) == (TritonOps, [])
    ops, (note,) = selected((7, 5))
    assert ops is TorchOps
    assert "8.0" in note
    assert "7.5" in note
    monkeypatch.setitem(sys.modules, "engine.kernels.gpu.ops", None)
    ops, (note,) = selected((9, 0))
    assert ops is TorchOps
    assert "engine.kernels.gpu.ops" in note
