"""What transformers loads is loaded, whatever its tensors are called and whatever lies beside them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import CheckpointError, InvalidRequest
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.checkpoints import open_checkpoint
from engine.input_processor import InputProcessor
from engine.loading import load_model
from engine.messages import CoreReady
from tests.engine.paged_runs import load
from tests.engine.test_checkpoints_hf_folder import TOKENS, WEIGHTS, check, edit_json, edit_weights
from tests.engine.tiny_models import write_tiny

LAYER = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (f"{LAYER}.rotary_emb.inv_freq", torch.ones(8)),
        (f"{LAYER}.rotary_emb.cos_cached", torch.ones(1, 1, 64, 16)),
        ("model.rotary_emb.sin_cached", torch.ones(64, 16)),
        (f"{LAYER}.k_scale", torch.tensor(0.5)),
        (f"{LAYER}.k_proj.output_scale", torch.tensor([0.5])),
        (f"{LAYER}.attn.v_scale", torch.tensor(0.5)),
        (f"{LAYER}.kv_scale", torch.tensor(0.5)),
        (f"{LAYER}.masked_bias", torch.tensor(0, dtype=torch.int64)),
        (f"{LAYER}.bias", torch.ones(1, 8, 8, dtype=torch.bool)),
        ("model.embed_tokens.position_ids", torch.arange(8)),
        ("lm_head.bias", torch.zeros(272)),
        (f"{LAYER}.q_proj.bias", torch.zeros(64)),
        ("mtp.layers.0.mlp.up_proj.weight", torch.ones(3, 3)),
        ("model.mtp_layers.0.input_layernorm.weight", torch.ones(3)),
        ("v_head.summary.weight", torch.ones(1, 64)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_left_out_is_named_and_changes_nothing(tmp_path: Path, name: str, values: torch.Tensor) -> None:
    model = write_tiny(tmp_path)
    edit_weights(tmp_path / WEIGHTS, **{name: values})
    check(tmp_path, model)
    [note] = [note for note in _notes(tmp_path) if "left out" in note]
    assert note.endswith(name.replace("1", "N").replace("0", "N"))


def _notes(folder: Path) -> list[str]:
    return load_model(EngineConfig(dtype="float32", device="cpu"), open_checkpoint(folder)).notes


def test_notes_name_a_kind_of_tensor_once(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    scales = {f"model.layers.{i}.self_attn.{k}_scale": torch.ones(1) for i in range(3) for k in "kv"}
    edit_weights(tmp_path / WEIGHTS, **scales)
    [note] = [note for note in _notes(tmp_path) if "left out" in note]
    assert note.count("model.layers.N.self_attn") == 2


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, num_hidden_layers=3)
    tensors = load_file(tmp_path / WEIGHTS)
    more = {name.replace(".2.", ".3."): value.clone() for name, value in tensors.items() if ".2." in name}
    save_file(tensors | more | {"model.layers.3.eh_proj.weight": torch.ones(4, 4)}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\..* is superfluous"):
        load(tmp_path)
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1)
    check(tmp_path, model)


@pytest.mark.parametrize("name", ["lm_head.bias", f"{LAYER}.q_proj.bias", "model.norm.bias"])
def test_a_bias_that_would_change_the_numbers_is_refused(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path)
    size = 272 if name == "lm_head.bias" else 64
    edit_weights(tmp_path / WEIGHTS, **{name: torch.zeros(size).index_fill(0, torch.tensor([size - 1]), 1e-4)})
    with pytest.raises(CheckpointError, match=f"tensor {name} is superfluous"):
        load(tmp_path)


def _without_prefix(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, folder / WEIGHTS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_names_without_a_prefix(tmp_path: Path, family: str, tied: bool) -> None:
    model = write_tiny(tmp_path, family, tie_word_embeddings=tied, head_dim=16)
    _without_prefix(tmp_path)
    check(tmp_path, model)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(
    ("architecture", "own"),
    [
        ("LlamaModel", None),
        ("Qwen3Model", None),
        ("Qwen3ForCausalLM", None),
        ("LlamaForSequenceClassification", "score.weight"),
        ("Qwen2ForTokenClassification", "score.weight"),
    ],
)
def test_a_network_without_a_head_embeds_and_does_nothing_else(
    tmp_path: Path, architecture: str, own: str | None, prefix: bool
) -> None:
    family = architecture.split("For")[0].removesuffix("Model").lower()
    model = write_tiny(tmp_path, family, head_dim=16)
    edit_weights(tmp_path / WEIGHTS, drop="lm_head.weight", **({own: torch.ones(2, 64)} if own else {}))
    edit_json(tmp_path / "config.json", architectures=[architecture])
    if not prefix:
        _without_prefix(tmp_path)
    if prefix and architecture == "Qwen3ForCausalLM":
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            load(tmp_path)
        return
    notes = _notes(tmp_path)
    assert any("embeddings only" in note for note in notes)
    assert own is None or any(own in note for note in notes)
    inputs = InputProcessor(EngineConfig(model=str(tmp_path)))
    info = CoreReady(**_info())
    inputs.validate(TOKENS, SamplingParams(max_tokens=0, pooling="last"), info)
    for params in (SamplingParams(), SamplingParams(max_tokens=0, prompt_logprobs=1)):
        with pytest.raises(InvalidRequest, match="can only embed"):
            inputs.validate(TOKENS, params, info)
    _check_embedding(tmp_path, model)


def _check_embedding(folder: Path, model: Any) -> None:
    from engine.llm import LLM

    with torch.no_grad():
        expected = model.model(torch.tensor([TOKENS])).last_hidden_state[0, -1]
    [found] = LLM(str(folder), dtype="float32", device="cpu", max_model_len=512).embed(TOKENS)
    assert torch.allclose(torch.tensor(found), expected, atol=1e-3)


def _info() -> dict[str, Any]:
    from tests.server.fake_engine import FakeEngine

    return {name: getattr(FakeEngine().info, name) for name in CoreReady.__struct_fields__} | {
        "vocab_size": 272,
        "max_model_len": 512,
        "kv_cache_tokens": 4096,
    }


@pytest.mark.parametrize(("mode", "pooling"), [("mean_tokens", "mean"), ("lasttoken", "last"), ("cls_token", None)])
def test_pooling_of_sentence_transformers(tmp_path: Path, mode: str, pooling: str | None) -> None:
    write_tiny(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    modes = dict.fromkeys(("mean_tokens", "lasttoken", "cls_token"), False) | {mode: True}
    edit_json(tmp_path / "1_Pooling" / "config.json", **{f"pooling_mode_{name}": on for name, on in modes.items()})
    if pooling is None:
        with pytest.raises(CheckpointError, match="pooling_mode_cls_token is not supported"):
            open_checkpoint(tmp_path)
    else:
        assert open_checkpoint(tmp_path).pooling == pooling


@pytest.mark.parametrize("word", ["Infinity", "-Infinity", "NaN"])
def test_numbers_that_only_python_writes(tmp_path: Path, word: str) -> None:
    model = write_tiny(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", f'{{"unused": {word},', 1))
    check(tmp_path, model)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": float(word.lower())}))
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["silu", "swish"])
def test_both_names_of_the_activation(tmp_path: Path, name: str) -> None:
    model = write_tiny(tmp_path, hidden_act=name)
    check(tmp_path, model)


@pytest.mark.parametrize("layer_types", [["sliding_attention", "full_attention", "sliding_attention"], None])
def test_layer_types_of_mistral_are_honoured(tmp_path: Path, layer_types: list[str] | None) -> None:
    model = write_tiny(tmp_path, "ministral", head_dim=16, sliding_window=24, layer_types=layer_types)
    edit_json(tmp_path / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])
    check(tmp_path, model)
