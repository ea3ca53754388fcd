"""Hugging Face folders: every form of configuration, one file or shards, and a reason for what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from configs.errors import CheckpointError
from configs.settings import EngineConfig
from engine.checkpoints import open_checkpoint
from engine.checkpoints.hf_folder import OWN_CODE
from engine.loading import load_model
from engine.text.tokenizer import load_tokenizer
from tests.engine.paged_runs import load, prefill
from tests.engine.test_models_logits import ROPES, assert_equal_logits, hf_logits, random_tokens
from tests.engine.tiny_models import CHAT_TEMPLATE, tiny_model, write_tiny

TOKENS = random_tokens(300)
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def write_old_form(folder: Path) -> None:
    """Rewrite config.json as transformers 4 did."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config))


def edit_weights(file: Path, *, drop: str = "", **added: torch.Tensor) -> None:
    tensors = load_file(file)
    tensors.pop(drop, None)
    save_file(tensors | added, file, metadata={"format": "pt"})


def check(folder: Path, model: Any) -> None:
    assert_equal_logits(prefill(load(folder), TOKENS), hf_logits(model, TOKENS))


@pytest.mark.parametrize("rope", ["default", "llama3"])
@pytest.mark.parametrize("old_form", [False, True])
def test_both_forms_of_rope_configuration(tmp_path: Path, rope: str, old_form: bool) -> None:
    model = write_tiny(tmp_path, rope_parameters=dict(ROPES[rope]))
    if old_form:
        write_old_form(tmp_path)
    config = open_checkpoint(tmp_path).config
    assert config.rope.theta == ROPES[rope]["rope_theta"]
    assert config.dtype == "float32"
    check(tmp_path, model)


def test_old_name_of_the_rope_type(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, rope_parameters=dict(ROPES["linear"]))
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_scaling={"type": "linear", "factor": 4.0})
    check(tmp_path, model)


def test_top_level_original_context_has_precedence(tmp_path: Path) -> None:
    write_tiny(tmp_path, rope_parameters=dict(ROPES["yarn"]))
    edit_json(tmp_path / "config.json", original_max_position_embeddings=128)
    assert open_checkpoint(tmp_path).config.rope.parameters["original_max_position_embeddings"] == 128


def test_null_means_the_default(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, num_key_value_heads=4)
    nulls = ("head_dim", "num_key_value_heads", "rope_scaling", "attention_bias", "mlp_bias", "hidden_act")
    edit_json(tmp_path / "config.json", dtype=None, torch_dtype=None, **dict.fromkeys(nulls))
    config = open_checkpoint(tmp_path).config
    assert (config.head_dim, config.num_kv_heads, config.dtype) == (16, 4, "float32")
    check(tmp_path, model)


def test_dtype_comes_from_the_weights_when_the_configuration_has_none(tmp_path: Path) -> None:
    model = write_tiny(tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", dtype=None)
    assert open_checkpoint(tmp_path).config.dtype == "bfloat16"
    edit_json(tmp_path / "config.json", torch_dtype="float16")
    assert open_checkpoint(tmp_path).config.dtype == "float16"
    rounded = tiny_model()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    check(tmp_path, rounded)


def test_window_only_where_it_is_used(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen2", sliding_window=32)
    assert open_checkpoint(tmp_path).config.sliding_windows == ()
    edit_json(
        tmp_path / "config.json", use_sliding_window=True, sliding_window=32, max_window_layers=1, layer_types=None
    )
    assert open_checkpoint(tmp_path).config.sliding_windows == (None, 32, 32)


def test_shards_are_read_through_the_index_alone(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    save_file({"stray": torch.zeros(3)}, tmp_path / WEIGHTS)
    save_file({"stray": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    check(tmp_path, model)


def test_opening_needs_no_torch(tmp_path: Path) -> None:
    write_tiny(tmp_path, max_shard_size="100KB")
    code = (
        "import sys; from engine.checkpoints import open_checkpoint; from engine.text.tokenizer import load_tokenizer\n"
        f"load_tokenizer(open_checkpoint({str(tmp_path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        open_checkpoint(tmp_path)


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, max_shard_size="100KB")
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tmp_path / weight_map[name], drop=name)
    with pytest.raises(CheckpointError, match=f"{weight_map[name]}: tensor {name} is missing"):
        open_checkpoint(tmp_path)


def test_tensor_that_the_index_does_not_name_is_superfluous(tmp_path: Path) -> None:
    write_tiny(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    edit_weights(shard, extra=torch.zeros(3))
    with pytest.raises(CheckpointError, match=f"{shard.name}: tensor extra is superfluous"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.2.self_attn.k_proj.weight"])
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path)
    edit_weights(tmp_path / WEIGHTS, drop=name)
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load(tmp_path)


def test_superfluous_tensor_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen2")
    name = "model.layers.0.self_attn.q_norm.weight"
    edit_weights(tmp_path / WEIGHTS, **{name: torch.ones(16)})
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: tensor {name} is superfluous"):
        load(tmp_path)


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=100)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight has shape \[96, 64\].*asks for \[100, 64\]"):
        load(tmp_path)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_head_is_the_embedding_whatever_else_is_stored(tmp_path: Path, equal: bool) -> None:
    model = write_tiny(tmp_path, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.detach()
    head = embedding.clone() if equal else torch.zeros_like(embedding)
    edit_weights(
        tmp_path / WEIGHTS, **{"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    check(tmp_path, model)


@pytest.mark.parametrize("size", [0, 4, 9, 200, -5])
def test_cut_weights_are_refused(tmp_path: Path, size: int) -> None:
    write_tiny(tmp_path)
    content = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: cannot be read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',  # other size
        b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 16]}}',
        b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',  # bytes that are nobody's
        b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',  # a hole
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},'
        b' "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',  # an overlap
        b'{"t": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"t": {"shape": [2]}}',
        b'{"t": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 16]}}',
        b"[" * 100_000,
        b"nothing",
    ],
    ids=lambda header: header[:60].decode(),
)
def test_malformed_weights_are_refused(tmp_path: Path, header: bytes) -> None:
    write_tiny(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: cannot be read as safetensors") as error:
        open_checkpoint(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_header_longer_than_any_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((2**63).to_bytes(8, "little") + bytes(100))
    with pytest.raises(CheckpointError, match=WEIGHTS):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside.safetensors", "a/../../outside.safetensors", 7, None, []])
def test_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: Any) -> None:
    write_tiny(tmp_path / "model")
    (tmp_path / "model" / WEIGHTS).rename(tmp_path / "outside.safetensors")
    edit_json(tmp_path / "model" / INDEX, weight_map={"model.norm.weight": name})
    with pytest.raises(CheckpointError, match="which is no file of the folder"):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_weights_of_another_type_are_named(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    edit_weights(tmp_path / WEIGHTS, **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"tensor model.norm.weight has type I8"):
        load(tmp_path)


def test_a_checkpoints_own_code_is_never_run(tmp_path: Path) -> None:
    """Neither where its architecture is known, which is then told, nor where it is not."""
    for folder, architecture in ((tmp_path / "known", "LlamaForCausalLM"), (tmp_path / "unknown", "OwnForCausalLM")):
        write_tiny(folder)
        code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        (folder / "own_code.py").write_text(code)
        auto_map = {"AutoModelForCausalLM": "own_code.Model", "AutoConfig": "own_code.Config"}
        edit_json(folder / "config.json", auto_map=auto_map, architectures=[architecture])
        edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own_code.Tokenizer", None]})
    assert load_model(EngineConfig(), open_checkpoint(tmp_path / "known")).notes[0] == OWN_CODE
    load_tokenizer(open_checkpoint(tmp_path / "known"))
    with pytest.raises(CheckpointError, match="OwnForCausalLM is not supported, and code of its own"):
        open_checkpoint(tmp_path / "unknown")
    assert not (tmp_path / "ran").exists()


def test_pickle_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="run any code"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported.*LlamaForCausalLM"),
        ({"hidden_act": "mish"}, "hidden_act mish"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type mrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type linear needs factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_configuration_that_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words) as error:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_layer_types_must_fit_the_layers(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    edit_json(tmp_path / "config.json", use_sliding_window=True, sliding_window=8, layer_types=["full_attention"])
    with pytest.raises(CheckpointError, match="layer_types"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("architectures", [None, ["Other", "LlamaForCausalLM"]])
def test_architecture_may_come_from_the_model_type(tmp_path: Path, architectures: list[str] | None) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "config.json", architectures=architectures)
    assert open_checkpoint(tmp_path).config.architecture == "LlamaForCausalLM"


def test_what_is_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="neither a Hugging Face folder nor"):
        open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match=r"no config\.json$"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=r"name one of its GGUF files instead: a\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_malformed_json_is_named(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (2, None, "<|im_end|>", (2,)),
        (5, [7, 0], "<|im_end|>", (7, 0, 5, 2)),
        (None, 0, {"content": "<|im_end|>"}, (0, 2)),
        ([4, 5], None, None, (4, 5)),
        (None, None, "Ġ", (223,)),
        (None, None, "q", (83,)),
        (["x", 4, -1, True], {"a": 1}, None, (4,)),
        ([4, 10**6], 272, None, (4,)),
    ],
)
def test_end_of_sequence_ids_are_the_union_of_all_sources(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, expected: tuple[int, ...]
) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=config)
    edit_json(tmp_path / "generation_config.json", eos_token_id=generation)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=tokenizer, chat_template=None)
    assert load_tokenizer(open_checkpoint(tmp_path)).eos_token_ids == expected


@pytest.mark.parametrize("named", [False, True])
def test_a_sequence_ends_with_the_turn_of_the_chat_template(tmp_path: Path, named: bool) -> None:
    """Base models' configurations go on naming the end of a text after they have been tuned for chats."""
    write_tiny(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=0)
    edit_json(tmp_path / "generation_config.json", eos_token_id=0)
    templates = [{"name": "default", "template": "{{ x }}"}, {"name": "tool_use", "template": CHAT_TEMPLATE}]
    edit_json(
        tmp_path / "tokenizer_config.json",
        eos_token="<|endoftext|>",
        chat_template=templates if named else CHAT_TEMPLATE,
    )
    assert load_tokenizer(open_checkpoint(tmp_path)).eos_token_ids == (0, 2)


def test_chat_template_from_each_of_its_places(tmp_path: Path) -> None:
    def templates() -> dict[str, str]:
        found = open_checkpoint(tmp_path).chat_templates
        oracle = AutoTokenizer.from_pretrained(tmp_path).chat_template
        assert found == (oracle if isinstance(oracle, dict) else {} if oracle is None else {"default": oracle})
        return found

    write_tiny(tmp_path)
    assert templates() == {"default": CHAT_TEMPLATE}
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit_json(tmp_path / "tokenizer_config.json", chat_template=named)
    assert templates() == {"tool_use": "tools", "default": "plain"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("of a folder")
    assert templates() == {"rag": "of a folder"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert templates() == {"default": "file", "rag": "of a folder"}
    (tmp_path / "additional_chat_templates" / "rag.jinja").unlink()
    (tmp_path / "chat_template.jinja").unlink()
    edit_json(tmp_path / "tokenizer_config.json", chat_template=None)
    assert templates() == {}
    edit_json(tmp_path / "chat_template.json", chat_template="of a processor")
    assert open_checkpoint(tmp_path).chat_templates == {"default": "of a processor"}


@pytest.mark.parametrize("template", [7, [7], {"default": 7}, [{"name": 7, "template": "x"}], {"default": None}])
def test_chat_template_that_is_no_text_is_named(tmp_path: Path, template: Any) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=template)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.chat_templates == {}
    assert "chat_template" in " ".join(checkpoint.notes) or template == [7]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in ("0.7", -1.0)),
        *(("top_p", value) for value in (0.0, 1.5, math.nan)),
        *(("top_k", value) for value in ("50", 2.5)),
        *(("min_p", value) for value in (True, [0.1])),
        *(("repetition_penalty", value) for value in (0, {})),
    ],
    ids=str,
)
def test_sampling_defaults_out_of_range_are_passed_over_and_named(tmp_path: Path, name: str, value: Any) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "generation_config.json", **{"top_k": 20, "temperature": 0.5, name: value})
    checkpoint = open_checkpoint(tmp_path)
    expected = {"top_k": 20, "temperature": 0.5, name: None}
    assert {key: checkpoint.generation_config.get(key) for key in expected} == expected
    assert any("generation_config.json" in note and name in note for note in checkpoint.notes)


def test_folder_without_a_tokenizer_opens(tmp_path: Path) -> None:
    model = write_tiny(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.eos_token_ids, checkpoint.generation_config, checkpoint.name) == ((2,), {}, tmp_path.name)
    check(tmp_path, model)
