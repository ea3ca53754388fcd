"""The command line: flags from the settings, and refusals of one line."""

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from configs.settings import EngineConfig, ServerConfig
from server import cli
from server.commands.serve import model_name
from server.flags import FIXED, FOREIGN, SAME, description, given_settings
from server.listener import bind

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

ROOT = Path(__file__).parents[2]


def parsed(*argv: str) -> dict[str, object]:
    parser, _ = cli.build_parser(argv)
    return dict(given_settings(parser.parse_args(argv), ServerConfig))


@pytest.mark.parametrize("command", [["serve"], ["generate"], ["chat"], ["bench", "throughput"], ["bench", "quality"]])
def test_help_names_every_setting(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    for field in msgspec.structs.fields(ServerConfig if command == ["serve"] else EngineConfig):
        assert field.name == "model" or "--" + field.name.replace("_", "-") in text


def test_flags_are_settings() -> None:
    given = parsed("serve", "folder", "--port", "5", "--no-enable-prefix-caching", "--dtype", "float32")
    assert given == {"model": "folder", "port": "5", "enable_prefix_caching": False, "dtype": "float32"}
    assert parsed("serve") == {}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--max-num-seq", "1"], ["--max-num-seq", "did you mean --max-num-seqs?"]),
        (["serve", "--port", "x"], ["--port", "'x'"]),
        (["serve", "--port", "70000"], ["--port", "65535"]),
        (["serve", "--dtype", "int8"], ["--dtype", "float32"]),
        (["serve", "--config", "none"], ["--config none", "cpu, gpu, test"]),
        (["serve", "--max_num_seq", "1"], ["did you mean --max-num-seqs?"]),
        (["serve", "--tensor-parallel-size", "2"], ["--tensor-parallel-size", "one device"]),
        (["serve", "--gpu-memory-utilization=0.9"], ["--gpu-memory-utilization", "--kv-cache-memory-fraction"]),
        (["serve", "--enable-lora"], ["--enable-lora", "adapters"]),
        (["serve", "-hf", "maker/model"], ["-hf", "GGUF file"]),
        (["serve", "--temp", "0.5"], ["--temp", "requests say it"]),
        (["generate", "--prompt", "a", "-ngl", "99"], ["-ngl", "--device"]),
        (["serve", "--max-model-len", "4x"], ["--max-model-len", "'4x'"]),
        (["serv"], ["serv", "serve"]),
        ([], ["COMMAND"]),
        (["bench"], ["WHAT"]),
        (["generate"], ["--prompt"]),
        (["serve", "--host", "256.0.0.1"], ["256.0.0.1"]),
        (["serve", "--host", "example.invalid"], ["example.invalid"]),
    ],
)
def test_refusals_are_one_line(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: error: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_a_port_in_use_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_clients_are_refused_until_the_server_listens() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


@pytest.mark.usefixtures("logging_as_it_was")
@pytest.mark.parametrize("argv", [["generate", "--prompt", "a"], ["serve", "--log-format", "json"], ["serve"]])
def test_unknown_variables_do_not_stop_the_start(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_PROT", "1")
    monkeypatch.setenv("OCTAVO_PORT", "tcp://10.0.0.1:8000")
    port = ["--port", "0"] if argv[0] == "serve" else []
    assert cli.main([argv[0], "/no/such", *argv[1:], *port]) == 2
    told = capsys.readouterr().err
    assert "unknown environment variable OCTAVO_PROT; did you mean OCTAVO_PORT?" in told
    assert "OCTAVO_PORT:" not in told
    assert told.startswith("{") is ("json" in argv)


def test_environment_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "x")
    assert cli.main(["generate", "--prompt", "a"]) == 2
    assert "OCTAVO_PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["folder", "--served-model-name", "a", "b"], {"served_model_name": ["a", "b"], "model": "folder"}),
        (["--served-model-name", "a", "--served-model-name", "b"], {"served_model_name": ["a", "b"]}),
        (["--served-model-name", "a", "b", str(ROOT)], {"served_model_name": ["a", "b"], "model": str(ROOT)}),
        (["--served-model-name", "a", "b" * 999], {"served_model_name": ["a", "b" * 999]}),
        (["--served-model-name", str(ROOT)], {"served_model_name": [str(ROOT)]}),
        (["--port", "5", "--port", "5"], {"port": "5"}),
        (["--port", "5", "folder"], {"port": "5", "model": "folder"}),
    ],
)
def test_values_that_add_up(argv: list[str], given: dict[str, object]) -> None:
    assert parsed("serve", *argv) == given


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["--model", "folder"], {"model": "folder"}),
        (["-m", "a.gguf", "-c", "0", "-t", "-1"], {"model": "a.gguf", "max_model_len": "0", "num_threads": "-1"}),
        (["folder", "--ctx-size=4k", "-np", "4"], {"model": "folder", "max_model_len": "4k", "max_num_seqs": "4"}),
        (["--alias", "a,b", "--served-model-name", "c"], {"served_model_name": ["a,b", "c"]}),
        (["--enforce-eager"], {"cuda_graphs": False}),
        (["--no-webui", "--verbose"], {"page": False, "log_level": "debug"}),
        (["--max-num-seqs", "4", "-fa", "--jinja", "folder"], {"max_num_seqs": "4", "model": "folder"}),
        (["folder", "--swap-space", "4", "-ngl", "99", "-fa", "on"], {"model": "folder"}),
        (["folder", "--tensor-parallel-size", "1", "-n", "-1"], {"model": "folder"}),
        (["--dtype", "bf16", "--reasoning-parser", "deepseek_r1"], {"dtype": "bfloat16", "reasoning_parser": "think"}),
    ],
)
def test_flags_of_other_servers(argv: list[str], given: dict[str, object]) -> None:
    assert parsed("serve", *argv) == given


def test_what_is_passed_over_is_told() -> None:
    argv = ["serve", "--swap-space=4", "--trust-remote-code", "-tp", "1"]
    parser, _ = cli.build_parser(argv)
    assert [one.split()[0] for one in parser.parse_args(argv).passed] == ["--swap-space", "--trust-remote-code"]
    assert parser.parse_args(["serve"]).passed == []


def test_other_servers_flags_hide_none_of_ours() -> None:
    known = {"--" + field.name.replace("_", "-") for field in msgspec.structs.fields(ServerConfig)}
    assert known.isdisjoint(name for flag in FOREIGN for name in flag.names)
    assert {*SAME, *(name for name, _ in FIXED.values())} <= set(ServerConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "5", "--port", "6"], ["--port 6", "5"]),
        (["--dtype", "bfloat16", "--dtype", "float32"], ["--dtype float32", "bfloat16"]),
        (["--page", "--no-page"], ["--no-page"]),
        (["--no-page", "--page"], ["--page"]),
        (["--no-ui", "--page"], ["--page"]),
        (["--config", "cpu", "--config", "test"], ["--config test", "cpu"]),
        (["--cuda-graphs", "--enforce-eager"], ["--enforce-eager"]),
        (["folder", "--model", "other"], ["--model other", "folder"]),
        (["-c", "4", "--max-model-len", "5"], ["--max-model-len 5"]),
    ],
)
def test_no_value_wins_silently_over_another(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *argv]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in ["contradicts", *words]), error


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("octavo ")


def test_every_setting_is_described() -> None:
    for field in msgspec.structs.fields(ServerConfig):
        assert description(field).endswith("."), field.name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ServerConfig(), "smollm2"),
        (ServerConfig(model="/a/Qwen3-0.6B"), "Qwen3-0.6B"),
        (ServerConfig(model="/a/Qwen3-0.6B/"), "Qwen3-0.6B"),
        (ServerConfig(model="/a/tiny-Q4_0.gguf"), "tiny-Q4_0"),
        (ServerConfig(model="/a/b", served_model_name=("c", "d")), "c"),
        (ServerConfig(model="/a/b", served_model_name=("",)), "b"),
    ],
)
def test_served_name(config: ServerConfig, name: str) -> None:
    assert model_name(config) == name


@pytest.mark.parametrize("module", ["server.cli", "server.app", "server.http_server", "server.commands.serve"])
def test_the_api_process_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_parsing_the_command_line_loads_no_server() -> None:
    code = "import sys, server.cli; server.cli.build_parser(); sys.exit('starlette' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
