"""Settings from defaults, TOML, environment and command line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.errors import SettingsError
from configs.settings import EngineConfig, SchedulerConfig, ServerConfig
from configs.sources import KNOWN_KEYS, preset_names, resolve, unknown_variables


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "port = 1\nmax_num_seqs = 1\nblock_size = 1\n")
    environ = {"OCTAVO_PORT": "2", "OCTAVO_MAX_NUM_SEQS": "2", "HOME": "/"}
    config = resolve(ServerConfig, toml=file, environ=environ, flags={"port": "3"})
    assert (config.port, config.max_num_seqs, config.block_size, config.host) == (3, 2, 1, "127.0.0.1")


def test_no_source_gives_the_defaults() -> None:
    assert resolve(ServerConfig) == ServerConfig()


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_for_every_layer(name: str) -> None:
    for cls in (SchedulerConfig, EngineConfig, ServerConfig):
        assert isinstance(resolve(cls, toml=name), cls)


def test_three_presets_are_shipped() -> None:
    assert preset_names() == ["cpu", "gpu", "test"]


def test_keys_of_other_layers_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "port = 1\nblock_size = 8\n")
    config = resolve(SchedulerConfig, toml=file, environ={"OCTAVO_HOST": "::"})
    assert config.block_size == 8
    assert not hasattr(config, "port")


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), ("1", True), ("0", False), ("false", False), ("False", False)]
)
def test_booleans_of_the_environment(value: str, expected: bool) -> None:
    config = resolve(EngineConfig, environ={"OCTAVO_ENABLE_PREFIX_CACHING": value})
    assert config.enable_prefix_caching is expected


@pytest.mark.parametrize(
    ("text", "number"), [("4k", 4000), ("4K", 4096), ("25.6k", 25_600), ("1m", 10**6), ("1M", 2**20), ("96", 96)]
)
def test_counts_with_a_unit(tmp_path: Path, text: str, number: int) -> None:
    """Small letters are decimal and capitals binary, as vLLM has it."""
    assert resolve(ServerConfig, flags={"max_model_len": text}).max_model_len == number
    assert resolve(ServerConfig, environ={"OCTAVO_MAX_BODY_BYTES": text}).max_body_bytes == number
    if not text.isdecimal():
        file = write(tmp_path / "a.toml", f"max_num_batched_tokens = '{text}'")
        assert resolve(ServerConfig, toml=file).max_num_batched_tokens == number


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("kv_cache_dtype", "fp8", "fp8_e4m3"),
        ("max_model_len", "auto", None),
        ("max_model_len", "0", None),
        ("num_threads", "-1", None),
    ],
)
def test_words_of_other_servers(tmp_path: Path, name: str, word: str, value: object) -> None:
    file = write(tmp_path / "a.toml", f"{name} = '{word}'")
    assert getattr(resolve(ServerConfig, environ={f"OCTAVO_{name.upper()}": word}), name) == value
    assert getattr(resolve(ServerConfig, toml=file), name) == value


def test_one_name_or_several(tmp_path: Path) -> None:
    for text, names in [("'a'", ("a",)), ("['a', 'b,c']", ("a", "b,c"))]:
        file = write(tmp_path / "a.toml", f"served_model_name = {text}")
        assert resolve(ServerConfig, toml=file).served_model_name == names
    assert resolve(ServerConfig, environ={"OCTAVO_SERVED_MODEL_NAME": "a, b"}).served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("a", ("a",)),
        ("a, b", ("a", "b")),
        (["a", "b,c"], ("a", "b", "c")),
        ('["a,b", "c"]', ("a,b", "c")),
        ("[]", ()),
    ],
)
def test_lists_of_texts(tmp_path: Path, given: str | list[str], values: tuple[str, ...]) -> None:
    """In one text, or in several as flags give them; in TOML a list is a list."""
    assert resolve(ServerConfig, flags={"allowed_origins": given}).allowed_origins == values
    file = write(tmp_path / "a.toml", f"allowed_origins = {list(values)}")
    assert resolve(ServerConfig, toml=file).allowed_origins == values


@pytest.mark.parametrize("given", ["[1]", "[", '["a"'])
def test_lists_that_are_none(given: str) -> None:
    with pytest.raises(SettingsError, match="OCTAVO_ALLOWED_ORIGINS"):
        resolve(ServerConfig, environ={"OCTAVO_ALLOWED_ORIGINS": given})


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"flags": {"max_num_seq": "1"}}, ["max_num_seq", "did you mean max_num_seqs?"]),
        ({"flags": {"max_num_seqs": "0"}}, ["--max-num-seqs", "int >= 1", "'0'"]),
        ({"flags": {"max_model_len": "-2"}}, ["--max-model-len", ">= 1"]),
        ({"flags": {"max_model_len": "4x"}}, ["--max-model-len", "'4x'"]),
        ({"flags": {"max_model_len": "1.0005k"}}, ["--max-model-len", "'1.0005k'"]),
        ({"flags": {"max_num_seqs": "auto"}}, ["--max-num-seqs", "'auto'"]),
        ({"flags": {"kv_cache_memory_fraction": "1k"}}, ["--kv-cache-memory-fraction", "'1k'"]),
        ({"flags": {"dtype": "int8"}}, ["--dtype", "int8"]),
        ({"environ": {"OCTAVO_PORT": "x"}}, ["OCTAVO_PORT", "'x'"]),
        ({"environ": {"OCTAVO_KV_CACHE_MEMORY_FRACTION": "1.5"}}, ["OCTAVO_KV_CACHE_MEMORY_FRACTION", "1.5"]),
        ({"toml": "no-such-preset"}, ["no-such-preset", "cpu, gpu, test"]),
    ],
)
def test_refusals_name_source_and_key(sources: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(ServerConfig, **sources)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["prot", "did you mean port?"]),
        ("[scheduler]\nblock_size = 1", ["unknown key scheduler"]),
        ("port = '1'", ["port", "int"]),
        ("port = ", ["not a TOML file"]),
    ],
)
def test_refusals_name_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    file = write(tmp_path / "settings.toml", text)
    with pytest.raises(SettingsError) as caught:
        resolve(ServerConfig, toml=file)
    assert all(word in str(caught.value) for word in ["settings.toml", *words]), str(caught.value)


def test_the_server_knows_every_setting() -> None:
    for cls in (SchedulerConfig, EngineConfig):
        assert {field.name for field in msgspec.structs.fields(cls)} <= set(KNOWN_KEYS)


@pytest.mark.parametrize("service", ["OCTAVO", "OCTAVO_GPU", "OCTAVO_0", "OCTAVO_LLM_SERVER"])
def test_variables_that_kubernetes_sets_for_a_service_are_not_meant(service: str) -> None:
    """For one that is called octavo, or octavo-gpu, they have the form of settings."""
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": "tcp://10.0.0.1:8000",
        f"{service}_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.0.0.1",
        f"{service}_PORT_53_UDP": "udp://10.0.0.1:53",
    }
    assert resolve(ServerConfig, environ=environ) == ServerConfig()
    assert unknown_variables(environ) == []
    assert resolve(ServerConfig, environ={**environ, "OCTAVO_PORT": "8001"}).port == 8001


def test_unknown_variables_are_told_with_the_nearest_name_and_without_their_value() -> None:
    environ = {
        "OCTAVO_PROT": "1",
        "OCTAVO_ZZZZZZ": "1",
        "OCTAVO_API_KEYS": "secret",
        "OTHER_PORT": "1",
        "OCTAVO_HOST": "::",
    }
    assert resolve(ServerConfig, environ=environ) == ServerConfig(host="::")
    assert unknown_variables(environ) == [
        "unknown environment variable OCTAVO_PROT; did you mean OCTAVO_PORT?",
        "unknown environment variable OCTAVO_ZZZZZZ",
        "unknown environment variable OCTAVO_API_KEYS; did you mean OCTAVO_API_KEY?",
    ]
