"""Checkpoints that nobody would write in good faith: a line that names the file and the entry, at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.errors import CheckpointError
from configs.settings import EngineConfig
from engine.checkpoints import open_checkpoint
from engine.llm import LLM
from engine.loading import load_model
from engine.start import max_context
from engine.text.tokenizer import load_tokenizer
from tests.engine.test_input_processor import byte_level
from tests.engine.tiny_gguf import write_gguf
from tests.engine.tiny_models import tiny_model, write_tiny

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

CONFIGS: list[tuple[str, Any, str]] = [
    ("num_hidden_layers", 10**9, "num_hidden_layers"),
    ("num_hidden_layers", -1, "num_hidden_layers"),
    ("num_attention_heads", 0, "num_attention_heads"),
    ("num_key_value_heads", 0, "num_key_value_heads"),
    ("num_key_value_heads", "2", "num_key_value_heads"),
    ("head_dim", 0, "head_dim"),
    ("head_dim", 15, "head_dim"),
    ("hidden_size", 0, "hidden_size"),
    ("hidden_size", True, "hidden_size"),
    ("vocab_size", 2.5, "vocab_size"),
    ("intermediate_size", [96], "intermediate_size"),
    ("max_position_embeddings", 1e15, "max_position_embeddings"),
    ("max_position_embeddings", 0, "max_position_embeddings"),
    ("rms_norm_eps", "1e-5", "rms_norm_eps"),
    ("rms_norm_eps", -1.0, "rms_norm_eps"),
    ("tie_word_embeddings", "no", "tie_word_embeddings"),
    ("architectures", [["LlamaForCausalLM"]], "architecture"),
    ("architectures", {"a": 1}, "architecture"),
    ("dtype", ["float32"], "dtype"),
    ("quantization_config", "fp8", "quantization_config"),
    ("quantization_config", {"quant_method": "fp8", "config_groups": [1]}, "config_groups"),
    ("rope_parameters", [1], "rope_parameters"),
    ("rope_parameters", YARN | {"factor": 0}, "rope_parameters.factor"),
    ("rope_parameters", YARN | {"factor": 1e30}, "rope_parameters.factor"),
    ("rope_parameters", YARN | {"factor": 1e6}, "rope factor 1e"),
    ("rope_parameters", YARN | {"factor": "4"}, "rope_parameters.factor"),
    ("rope_parameters", YARN | {"rope_theta": 1.0}, "rope_theta"),
    ("rope_parameters", YARN | {"beta_fast": -1}, "beta_fast"),
    ("rope_parameters", YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ("rope_parameters", {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}, "short_factor"),
    (
        "rope_parameters",
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
        "high_freq_factor",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile")
    write_tiny(path, "mistral", sliding_window=None)
    return path


def configured(folder: Path, tmp_path: Path, text: str) -> Path:
    """The folder's files with `text` as config.json."""
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(("key", "value", "words"), CONFIGS, ids=str)
def test_configuration_is_refused_by_file_and_key(
    folder: Path, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    path = configured(folder, tmp_path, json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        LLM(str(path))
    message = str(error.value)
    assert f"{path}/config.json" in message
    assert words in message
    assert len(message.splitlines()) == 1
    assert len(message) < 600


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", "[]", "\x00"]
)
def test_configuration_that_is_no_object_is_refused(folder: Path, tmp_path: Path, text: str) -> None:
    path = configured(folder, tmp_path, text)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        LLM(str(path))


GGUFS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"block_count": 2**31}, {}, "llama.block_count"),
    ({"attention.head_count": 0}, {}, "attention.head_count"),
    ({"attention.head_count": []}, {}, "attention.head_count is missing"),
    ({"attention.head_count_kv": "2"}, {}, "attention.head_count_kv"),
    ({"attention.key_length": 0}, {}, "attention.key_length"),
    ({"embedding_length": 0}, {}, "embedding_length"),
    ({"context_length": 2**30}, {}, "context_length"),
    ({"rope.freq_base": float("nan")}, {}, "rope.freq_base"),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0}, {}, "rope.scaling.factor"),
    ({"rope.scaling.type": ["yarn"], "rope.scaling.factor": 2.0}, {}, "rope.scaling.type"),
    ({"attention.layer_norm_rms_epsilon": "x"}, {}, "attention.layer_norm_rms_epsilon"),
    ({}, {"general.alignment": 0}, "general.alignment"),
    ({}, {"general.alignment": "32"}, "general.alignment"),
    ({}, {"general.architecture": ["llama"]}, "architecture"),
    ({}, {"split.count": "2"}, "split.count"),
    ({}, {"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
    ({}, {"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id"),
]


@pytest.mark.parametrize(("metadata", "whole", "words"), GGUFS, ids=str)
def test_metadata_is_refused_by_file_and_key(
    tmp_path: Path, metadata: dict[str, Any], whole: dict[str, Any], words: str
) -> None:
    path = tmp_path / "m.gguf"
    empty = {key: value for key, value in metadata.items() if value != []} | {
        k: None for k, v in metadata.items() if v == []
    }
    write_gguf(path, tiny_model(num_hidden_layers=1, vocab_size=99), metadata=empty, top_metadata=byte_level() | whole)
    with pytest.raises(CheckpointError) as error:
        LLM(str(path))
    assert str(path) in str(error.value)
    assert words in str(error.value)


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    nested = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    pair = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + nested * 100_000
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    (tmp_path / "m.gguf").write_bytes(head + pair)
    with pytest.raises(CheckpointError, match=r"m\.gguf: cut or malformed header"):
        open_checkpoint(tmp_path / "m.gguf")


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([0, 1, 2, 64, 1e30]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
ROPE_KEYS = [
    "factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "rope_theta",
]
ROPES = st.dictionaries(
    st.sampled_from([*ROPE_KEYS, "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
    ANY | st.just(2.0),
)
KINDS = st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])


def opens_or_refuses(path: Path) -> None:
    """Whatever else is raised fails the test."""
    settings = EngineConfig(model=str(path), device="cpu", dtype="float32", attention_backend="torch_reference")
    try:
        checkpoint = open_checkpoint(path)
        max_context(settings, checkpoint.config)
        load_model(settings, checkpoint)
        load_tokenizer(checkpoint)
    except CheckpointError as error:
        message = str(error)
    else:
        message = ""
    assert len(message.encode()) < 2000, "a line, which can be printed"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_configuration_is_opened_or_refused(folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    config = json.loads((folder / "config.json").read_text())
    keys = [*config, "sliding_window", "layer_types", "quantization_config", "num_nextn_predict_layers", "eos_token_id"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), ANY, max_size=3))
    if data.draw(st.booleans()):
        changes["rope_parameters"] = data.draw(ROPES) | {"rope_type": data.draw(KINDS)}
    for file in tmp_path.iterdir():
        file.unlink()
    opens_or_refuses(configured(folder, tmp_path, json.dumps(config | changes)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_file_of_gguf_is_opened_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    if not (tmp_path / "whole").exists():
        write_gguf(path, tiny_model(num_hidden_layers=1, vocab_size=99), top_metadata=byte_level())
        path.rename(tmp_path / "whole")
    content = bytearray((tmp_path / "whole").read_bytes())
    for offset, byte in data.draw(st.dictionaries(st.integers(4, 3500), st.integers(0, 255), max_size=5)).items():
        content[offset] = byte
    path.write_bytes(content)
    opens_or_refuses(path)


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 10**9), ("hidden_size", 0), ("rope_parameters", 7)])
def test_serve_ends_with_one_line_and_code_2(folder: Path, tmp_path: Path, key: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    path = configured(folder, tmp_path, json.dumps(config))
    command = [sys.executable, "-m", "server.cli", "serve", "--model", str(path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    [line] = [line for line in ended.stderr.splitlines() if "error" in line]
    assert f"{path}/config.json: {key}" in line
    assert "Traceback" not in ended.stderr
