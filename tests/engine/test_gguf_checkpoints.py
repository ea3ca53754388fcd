"""GGUF files: what is stored is what is served, and what cannot be served is refused by name."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from configs.errors import CheckpointError
from configs.settings import EngineConfig
from engine.checkpoints import StoredTensor, open_checkpoint
from engine.checkpoints.gguf_reader import TENSOR_TYPES, read_gguf
from engine.start import max_context
from engine.weights.dequantise import read_into
from tests.engine.paged_runs import load, prefill
from tests.engine.test_models_logits import (
    GPT_SIZES,
    LONG,
    MULTIPLIERS,
    ROPES,
    SCALED_QUERIES,
    SHORT,
    assert_equal_logits,
    hf_logits,
    random_tokens,
)
from tests.engine.tiny_gguf import Kind, add_value, quantised, write_gguf
from tests.engine.tiny_models import tiny_model

TOKENS = random_tokens(300)
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 64,
}


def check(path: Path, model: Any) -> None:
    assert_equal_logits(prefill(load(path), TOKENS), hf_logits(model, TOKENS))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("gemma", {"head_dim": 32}),
        ("gemma2", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
        ("gemma3_text", {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 7, "query_pre_attn_scalar": 32}),
        ("granite", MULTIPLIERS),
        ("smollm3", {"pad_token_id": 0, "num_hidden_layers": 5}),
        ("phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.75, "sliding_window": 30}),
        ("olmo2", {}),
        ("olmo3", {"num_hidden_layers": 4, "sliding_window": 24}),
        ("exaone4", {"num_hidden_layers": 4, "sliding_window": 24, "head_dim": 16}),
        ("glm4", {"pad_token_id": 0, "head_dim": 32, "attention_bias": True}),
        ("cohere", {"logit_scale": 0.25}),
        ("cohere2", {"num_hidden_layers": 5, "sliding_window": 24, "head_dim": 16}),
        ("stablelm", {"use_qkv_bias": True}),
        ("starcoder2", {"sliding_window": None}),
        ("seed_oss", {"head_dim": 16, "attention_bias": True}),
        ("arcee", {}),
        ("gpt_neox", {}),
        ("gpt2", GPT_SIZES),
        ("phi", {}),
        ("falcon", {}),
    ],
)
def test_family_equals_transformers(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    model = tiny_model(family, **config)
    write_gguf(tmp_path / "m.gguf", model)
    check(tmp_path / "m.gguf", model)


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name
)
def test_stored_type_equals_transformers_on_the_dequantised_weights(tmp_path: Path, kind: Kind) -> None:
    model = tiny_model()
    write_gguf(tmp_path / "m.gguf", model, kind)
    check(tmp_path / "m.gguf", model)


def test_an_opened_file_holds_no_copy_of_its_weights(tmp_path: Path) -> None:
    """Rows in another order, as Llama's q and k, are put into theirs where they are used."""
    write_gguf(tmp_path / "m.gguf", tiny_model(), Kind.Q8_0)
    tensors = open_checkpoint(tmp_path / "m.gguf").tensors
    assert any(tensor.row_order is not None for tensor in tensors.values())
    for tensor in tensors.values():
        assert not tensor.read().flags.owndata
        assert np.shares_memory(tensor.read(), tensor.read())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_quantised_embedding(tmp_path: Path, kind: Kind, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied, hidden_size=256, num_hidden_layers=1)
    kinds = {"model.embed_tokens.weight": kind, "lm_head.weight": kind}
    write_gguf(tmp_path / "m.gguf", model, kinds=kinds)
    check(tmp_path / "m.gguf", model)


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}),
        (ROPES["yarn"], YARN),
        (
            ROPES["yarn"] | {"beta_fast": 8.0, "beta_slow": 2.0},
            YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
        ),
    ],
)
def test_rope_scaling_metadata(tmp_path: Path, rope: dict[str, Any], metadata: dict[str, Any]) -> None:
    model = tiny_model(rope_parameters={"rope_theta": 10000.0} | rope)
    write_gguf(tmp_path / "m.gguf", model, metadata=metadata)
    check(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("multiplier", [0.0, 0.7, 1.0])
def test_a_context_behind_which_queries_are_scaled_is_the_limit(tmp_path: Path, multiplier: float) -> None:
    own = {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
    model = tiny_model("ministral3", head_dim=16, rope_parameters=SCALED_QUERIES | own)
    scaling = {"rope.scaling.original_context_length": 520, "attention.temperature_length": 520}
    scaling |= {"rope.scaling.yarn_log_multiplier": multiplier} if multiplier else {}
    write_gguf(tmp_path / "m.gguf", model, metadata=YARN | scaling | {"attention.temperature_scale": 0.1})
    check(tmp_path / "m.gguf", model)
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert config.max_position_embeddings == 1024
    assert max_context(EngineConfig(), config) == 520


@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_yarns_attention_factor_is_multiplied_by_the_files_own(tmp_path: Path, factor: float) -> None:
    own = factor * (0.1 * math.log(16.0) + 1.0)
    model = tiny_model(rope_parameters=ROPES["yarn"] | {"attention_factor": own})
    write_gguf(tmp_path / "m.gguf", model, metadata=YARN | {"rope.scaling.attn_factor": factor})
    check(tmp_path / "m.gguf", model)


def test_llama3_scaling_is_read_from_its_tensor(tmp_path: Path) -> None:
    model = tiny_model(rope_parameters=dict(ROPES["llama3"]))
    rotary = model.model.rotary_emb
    plain = 500000.0 ** -(torch.arange(0, 16, 2).float() / 16)
    write_gguf(tmp_path / "m.gguf", model, extra_tensors={"rope_freqs.weight": (plain / rotary.inv_freq).numpy()})
    check(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("length", [60, 200])
def test_longrope_factors_are_read_from_their_tensors(tmp_path: Path, length: int) -> None:
    model = tiny_model(rope_parameters=dict(ROPES["longrope"]), max_position_embeddings=512)
    factors = {
        "rope_factors_short.weight": np.array(SHORT, np.float32),
        "rope_factors_long.weight": np.array(LONG, np.float32),
    }
    metadata = {"rope.scaling.original_context_length": 64}
    write_gguf(tmp_path / "m.gguf", model, metadata=metadata, extra_tensors=factors)
    tokens = TOKENS[:length]
    assert_equal_logits(prefill(load(tmp_path / "m.gguf"), tokens), hf_logits(model, tokens))


def test_sliding_window_metadata(tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=32)
    write_gguf(tmp_path / "m.gguf", model, metadata={"attention.sliding_window": 32})
    check(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("kind", [k for k in Kind if k.name in {t[0] for t in TENSOR_TYPES.values()}], ids=str)
def test_every_type_equals_the_gguf_package(kind: Kind) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    assert TENSOR_TYPES[kind] == (kind.name, elements, size)
    rows, columns = 70, 2 * 256
    data = np.random.default_rng(0).integers(0, 60, (rows, columns // elements * size), dtype=np.uint8)
    expected = data.view(np.float64) if kind == Kind.F64 else gguf.dequantize(data, kind)
    assert np.isfinite(expected).all()
    stored = StoredTensor("t", Path("f"), "t", (rows, columns), kind.name, data.size, lambda: data.reshape(-1))
    out = torch.full((rows, columns), torch.nan)
    read_into(out, stored)
    assert torch.equal(out, torch.from_numpy(expected.astype(np.float32)))


def test_types_that_the_gguf_package_cannot_dequantise_are_not_in_the_table() -> None:
    known = {kind for kind in Kind if kind.name in ("F32", "F16", "F64") or kind in gguf.quants._type_traits}
    assert set(TENSOR_TYPES) == {int(kind) for kind in known if kind in gguf.GGML_QUANT_SIZES}


def write_metadata(path: Path, metadata: dict[str, Any], arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add_value(writer, key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_equals_the_gguf_package(tmp_path: Path) -> None:
    path = write_metadata(
        tmp_path / "m.gguf",
        {
            "a": 7,
            "b": 1.5,
            "c": "Zoë 🙂",
            "d": True,
            "e": ["x", "", "ü"],
            "f": [1, 2, 3],
            "g": [0.5, 2.0],
            "h": [[1], [2]],
        },
    )
    fields = gguf.GGUFReader(path).fields
    metadata = read_gguf(path).metadata
    for key in "abcdefg":
        assert metadata[key] == fields[key].contents()
    assert metadata["h"] == [[1], [2]]


def test_vocabulary_and_template_are_read(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    tokens = [f"t{i}" for i in range(model.config.vocab_size)]
    writer_metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "merges": ["a b"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": 0,
        "unknown_token_id": 0,
        "add_bos_token": False,
    }
    path = tmp_path / "tiny.Q8_0.gguf"
    write_gguf(
        path,
        model,
        top_metadata={f"tokenizer.ggml.{k}": v for k, v in writer_metadata.items()}
        | {"tokenizer.chat_template": "{{ x }}"},
    )
    checkpoint = open_checkpoint(path)
    vocabulary = checkpoint.tokenizer_source
    assert checkpoint.name == "tiny.Q8_0"
    assert checkpoint.chat_template == "{{ x }}"
    assert checkpoint.eos_token_ids == (2, 0)
    assert (vocabulary.model, vocabulary.pre, vocabulary.tokens) == ("gpt2", "smollm", tokens)
    assert (vocabulary.bos_token_id, vocabulary.eos_token_id, vocabulary.unk_token_id) == (1, 2, 0)
    assert (vocabulary.add_bos_token, vocabulary.add_eos_token, vocabulary.merges) == (False, None, ["a b"])


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({"context_length": None}, {}, "llama.context_length is missing"),
        ({"expert_count": 8}, {}, "experts"),
        ({"rope.dimension_count": 8}, {}, "part of the head"),
        ({"rope.scaling.type": "su", "rope.scaling.factor": 2.0}, {}, "rope.scaling.type su"),
        ({"attention.causal": False}, {}, "attention.causal"),
        ({"pooling_type": 2}, {}, "pooling_type"),
        ({"pooling_type": 4}, {}, "pooling_type"),
        (YARN | {"rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor"),
        ({"attention.head_count_kv": [2, 4, 2]}, {}, "attention.head_count_kv differs"),
        ({"attention.value_length": 8}, {}, "attention.value_length"),
        ({"block_count": 4}, {}, "layers.3.input_layernorm.weight is missing"),
        ({}, {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, "attn_sinks.weight is superfluous"),
        ({}, {"blk.7.attn_q.weight": np.zeros((64, 64), np.float32)}, "blk.7.attn_q.weight is superfluous"),
        ({"feed_forward_length": 64}, {}, r"blk.0.ffn_gate.weight has shape \[96, 64\]"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_model(), metadata=metadata, extra_tensors=tensors)
    with pytest.raises(CheckpointError, match=words) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(("number", "pooling"), [(None, "last"), (0, "last"), (1, "mean"), (3, "last")])
def test_pooling_of_embeddings(tmp_path: Path, number: int | None, pooling: str) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model(num_hidden_layers=1), metadata={"pooling_type": number})
    assert open_checkpoint(tmp_path / "m.gguf").pooling == pooling


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "m.gguf", {}, arch="mamba")
    with pytest.raises(CheckpointError, match=r"mamba is not supported.*llama,.* qwen2, qwen3"):
        open_checkpoint(path)


def test_one_part_of_a_split_file_whose_others_cannot_be_found_is_refused(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "m.gguf", {"split.count": 3})
    with pytest.raises(CheckpointError, match="one part of 3"):
        open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: cannot be read"):
        open_checkpoint(path.rename(tmp_path / "m-00001-of-00003.gguf"))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("named", [1, 3])
def test_any_part_of_a_split_file_stands_for_the_whole(tmp_path: Path, kind: Kind, named: int) -> None:
    model = tiny_model()
    write_gguf(tmp_path / "m.gguf", model, kind, split=3)
    check(tmp_path / f"m-{named:05}-of-00003.gguf", model)
    assert open_checkpoint(tmp_path / f"m-{named:05}-of-00003.gguf").name == "m"


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.02, 0.05, 0.5, 0.999])
def test_cut_file_is_refused(tmp_path: Path, share: float) -> None:
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    write_gguf(whole, tiny_model(), Kind.Q8_0)
    content = whole.read_bytes()
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf: (cut|cannot be read|not a GGUF)"):
        load(cut)


@pytest.mark.parametrize(
    "content", [b"GGML" + bytes(100), b"GGUF\x01" + bytes(100), b"GGUF\x00\x00\x00\x03" + bytes(99)]
)
def test_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf: (not a GGUF file|GGUF version)"):
        open_checkpoint(path)


def test_bundled_checkpoint(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.config.num_layers == 30
    assert checkpoint.eos_token_ids == (2, 0)
    assert "im_start" in (checkpoint.chat_template or "")
    decoder = load(smollm2_path)
    assert decoder.weights.num_parameters == 134_515_008
    # "The capital of France is" in the bundled vocabulary, " Paris" next.
    vocabulary = checkpoint.tokenizer_source.tokens
    prompt = [vocabulary.index(token) for token in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    assert vocabulary[int(prefill(decoder, prompt)[-1].argmax())] == "ĠParis"


def test_quantised_helper_writes_what_it_says() -> None:
    values = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    for kind in (Kind.Q4_K, Kind.Q6_K):
        assert np.isfinite(gguf.dequantize(quantised(values, kind), kind)).all()
