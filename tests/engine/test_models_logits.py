"""Logits equal transformers' in float32, for every family and rotary kind, in every shape of step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.metadata import AttentionBackend
from engine.attention.torch_reference import TorchReferenceAttention
from engine.checkpoints import open_checkpoint
from engine.kernels import select_ops
from engine.models.decoder import Decoder
from tests.engine.paged_runs import PagedRun, load, prefill
from tests.engine.tiny_models import VOCAB_SIZE, write_tiny

LONG, SHORT = [1.0, 1.5, 2.5, 4.0, 6.0, 7.0, 9.0, 12.0], [1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}
YARN_VARIANTS: list[dict[str, Any]] = [
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"mscale": 0.707},
    {"attention_factor": 1.3},
    {"truncate": False},
    {"beta_fast": 8.0, "beta_slow": 2.0},
]

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}
GPT_SIZES = {"n_positions": 1024, "n_embd": 64, "n_layer": 3, "n_head": 4}
SCALED_QUERIES = ROPES["yarn"] | {"original_max_position_embeddings": 520, "llama_4_scaling_beta": 0.1}
GRANITE_4 = {
    "layer_types": ["full_attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "position_embedding_type": "rope",
    "mamba_n_heads": 8,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
OLMO_ROPES = {"full_attention": ROPES["yarn"], "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

NEWER_FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"head_dim": 32}),
    ("gemma", {"head_dim": 16, "attention_bias": True, "hidden_act": "gelu"}),
    ("gemma2", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0}),
    ("gemma2", {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 7, "query_pre_attn_scalar": 40}),
    ("gemma3_text", {"head_dim": 16, "rope_parameters": GEMMA_ROPES, "layer_types": MIXED, "sliding_window": 40}),
    ("granite", MULTIPLIERS | {"rms_norm_eps": 0.05}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("granitemoehybrid", MULTIPLIERS | GRANITE_4),
    ("granitemoehybrid", GRANITE_4 | {"position_embedding_type": "nope"}),
    ("smollm3", {"pad_token_id": 0, "num_hidden_layers": 4}),
    ("smollm3", {"pad_token_id": 0, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 24}),
    ("phi3", {"pad_token_id": 0}),
    ("phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.75, "sliding_window": 30}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True}),
    ("olmo3", {"num_hidden_layers": 4, "sliding_window": 24}),
    ("olmo3", {"rope_parameters": OLMO_ROPES, "layer_types": MIXED, "sliding_window": 40}),
    ("exaone4", {"num_hidden_layers": 4, "sliding_window": 24, "head_dim": 16}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "head_dim": 16}),
    ("glm", {"pad_token_id": 0, "head_dim": 32, "attention_bias": True}),
    ("glm4", {"pad_token_id": 0, "head_dim": 32, "attention_bias": True}),
    ("glm4", {"pad_token_id": 0, "head_dim": 16, "attention_bias": False}),
    ("cohere", {"logit_scale": 0.25}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
    ("cohere2", {"num_hidden_layers": 5, "sliding_window": 24}),
    ("stablelm", {}),
    ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    ("starcoder2", {"sliding_window": None}),
    ("starcoder2", {"sliding_window": 30, "use_bias": False}),
    ("seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": True}),
    ("arcee", {"mlp_bias": True}),
    ("helium", {"head_dim": 16}),
    ("gpt_neox", {}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt2", GPT_SIZES),
    ("gpt2", GPT_SIZES | {"n_inner": 80, "activation_function": "relu", "scale_attn_weights": False}),
    ("gptj", GPT_SIZES | {"rotary_dim": 8}),
    ("phi", {}),
    ("ministral3", {"head_dim": 16, "rope_parameters": SCALED_QUERIES}),
    ("ministral3", {"head_dim": 16, "sliding_window": 30, "rope_parameters": SCALED_QUERIES}),
    ("falcon", {}),
    ("falcon", {"bias": True, "activation": "relu", "ffn_hidden_size": 80}),
    ("opt", {"ffn_dim": 80, "pad_token_id": 0}),
    ("opt", {"ffn_dim": 96, "pad_token_id": 0, "enable_bias": False, "tie_word_embeddings": False}),
]

FAMILY_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    ("mistral", {"sliding_window": 32}),
    ("mistral", {"sliding_window": None}),
    ("ministral", {"head_dim": 32, "sliding_window": 24, "layer_types": MIXED}),
    ("ministral", {"head_dim": 32, "sliding_window": 24, "layer_types": ["full_attention"] * 3}),
    ("ministral", {"head_dim": 32, "sliding_window": 24}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    (
        "qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": MIXED,
        },
    ),
    *NEWER_FAMILIES,
]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def hf_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def assert_equal_logits(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() < 1e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def load_on(machine: str, path: Path) -> tuple[Decoder, type[AttentionBackend]]:
    """The network with torch's or with the C++ kernels' operations and attention."""
    if machine == "torch":
        return load(path), TorchReferenceAttention
    from engine.attention.cpu import CPUAttention

    config = open_checkpoint(path).config
    ops, notes = select_ops(config, torch.device("cpu"), torch.float32)
    if notes:
        pytest.skip(notes[0])
    return load(path, ops=ops), CPUAttention


@pytest.mark.parametrize("machine", ["torch", "cpu"])
@pytest.mark.parametrize(("family", "config"), FAMILY_CONFIGS, ids=str)
def test_family_equals_transformers_whole_chunked_decoded_and_mixed(
    tmp_path: Path, family: str, config: dict[str, Any], machine: str
) -> None:
    model = write_tiny(tmp_path, family, **config)
    prompts = [random_tokens(520), random_tokens(90, 1), random_tokens(7, 2)]
    decoder, backend = load_on(machine, tmp_path)
    expected = [hf_logits(model, prompt) for prompt in prompts]

    assert_equal_logits(PagedRun(decoder, prompts[:1], backend).step({0: prompts[0]})[0], expected[0])

    run, got = PagedRun(decoder, prompts, backend), [[], [], []]
    # Three requests of different length: chunks of one beside decodes of the others.
    for sizes in [(100, 40, 5), (1, 17, 1), (200, 1, 1), (218, 1, 0), (1, 31, 0)]:
        chunks = {seq: prompts[seq][run.computed[seq] :][:size] for seq, size in enumerate(sizes) if size}
        for seq, logits in run.step(chunks).items():
            got[seq].append(logits)
    for seq in range(3):
        assert_equal_logits(torch.cat(got[seq]), expected[seq])


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_rope_kind_equals_transformers_at_every_position(tmp_path: Path, family: str, rope: str) -> None:
    size = {"max_position_embeddings": 128} if rope == "dynamic" else {}
    head = {"head_dim": 16} if family == "qwen3" else {}
    model = write_tiny(tmp_path, family, rope_parameters=dict(ROPES[rope]), **size, **head)
    tokens = random_tokens(600)
    assert_equal_logits(prefill(load(tmp_path), tokens), hf_logits(model, tokens))


@pytest.mark.parametrize("variant", YARN_VARIANTS, ids=str)
def test_yarn_variants_equal_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    model = write_tiny(tmp_path, rope_parameters=ROPES["yarn"] | variant)
    tokens = random_tokens(500)
    assert_equal_logits(prefill(load(tmp_path), tokens), hf_logits(model, tokens))


@pytest.mark.parametrize("length", [40, 50, 64, 65, 128, 129, 200])
@pytest.mark.parametrize(("rope", "size"), [("dynamic", 128), ("longrope", 512)])
def test_length_dependent_rope_follows_the_prompt_not_the_chunk(
    tmp_path: Path, rope: str, size: int, length: int
) -> None:
    model = write_tiny(tmp_path, rope_parameters=dict(ROPES[rope]), max_position_embeddings=size)
    tokens = random_tokens(length)
    decoder, expected = load(tmp_path), hf_logits(model, tokens)
    assert_equal_logits(prefill(decoder, tokens), expected)
    run = PagedRun(decoder, [tokens])
    chunks = [run.step({0: tokens[start : start + 33]})[0] for start in range(0, length, 33)]
    assert_equal_logits(torch.cat(chunks), expected)


@pytest.mark.parametrize(("rope", "size", "length"), [("dynamic", 64, 58), ("longrope", 512, 58), ("llama3", 1024, 58)])
def test_decode_across_the_original_context_equals_transformers(
    tmp_path: Path, rope: str, size: int, length: int
) -> None:
    model = write_tiny(tmp_path, rope_parameters=dict(ROPES[rope]), max_position_embeddings=size)
    prompt = random_tokens(length)
    theirs = model.generate(
        torch.tensor([prompt]),
        min_new_tokens=20,
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    run, tokens = PagedRun(load(tmp_path), [prompt]), prompt
    for expected, token in zip(theirs.logits, theirs.sequences[0, length:].tolist(), strict=True):
        assert_equal_logits(run.step({0: tokens})[0][-1:], expected)
        tokens = [token]
