"""What is shipped: the wheel's content, and containers whose commands the command line knows."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.settings import ServerConfig
from configs.sources import resolve
from server.cli import build_parser
from server.flags import given_settings

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {"configs", "scheduler", "engine", "server", "octavo.py"}


def settings_of(command: list[str]) -> ServerConfig:
    """Fails for a command with a flag or value that the command line refuses."""
    parser, _ = build_parser()
    arguments = parser.parse_args(command)
    return resolve(ServerConfig, toml=arguments.config, flags=given_settings(arguments, ServerConfig))


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, rest in lines]


def last(word: str) -> str:
    return [rest for name, rest in instructions() if name == word][-1]


def test_the_image_serves_on_the_port_it_exposes() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["octavo"]
    config = settings_of(json.loads(last("CMD")))
    assert config.host == "0.0.0.0"
    assert last("EXPOSE") == str(config.port)
    assert f"127.0.0.1:{config.port}/health" in last("HEALTHCHECK")


def test_the_image_runs_without_privileges_and_without_build_tools() -> None:
    stages = [index for index, (word, _) in enumerate(instructions()) if word == "FROM"]
    assert len(stages) == 2
    final = instructions()[stages[1] :]
    assert [rest for word, rest in final if word == "USER"] == ["octavo"]
    assert not any("pip" in rest for _, rest in final)


def test_the_image_copies_every_package() -> None:
    copied = " ".join(rest for word, rest in instructions() if word == "COPY").split()
    assert set(copied) >= TOP_LEVEL | {"pyproject.toml", "constraints.txt", "README.md"}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_compose_profiles(kind: str) -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    [service] = [one for one in services.values() if one["profiles"] == [kind]]
    config = settings_of(service["command"])
    assert config.device == {"cpu": "cpu", "gpu": "cuda"}[kind]
    assert config.host == "0.0.0.0"
    assert service["ports"] == [f"127.0.0.1:8000:{config.port}"]
    assert all(volume.endswith(":ro") for volume in service["volumes"])
    assert ("deploy" in service) == (kind == "gpu")
    torch_index = service["build"].get("args", {}).get("TORCH_INDEX", "cpu")
    assert ("cpu" in torch_index) == (kind == "cpu")


def test_the_console_script_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"octavo": "server.cli:main"}
    assert "Private :: Do Not Upload" in project["classifiers"]


def test_the_wheel_holds_the_packages_and_their_data_and_nothing_else(tmp_path: Path) -> None:
    listed = {"pyproject.toml", "README.md", "octavo.py", "configs", "scheduler", "engine", "server"}
    source = tmp_path / "source"
    source.mkdir()
    for name in listed & set(os.listdir(ROOT)):
        (source / name).symlink_to(ROOT / name)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    names = zipfile.ZipFile(source / built.stdout.split()[-1]).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == TOP_LEVEL
    assert {"configs/presets/cpu.toml", "configs/presets/gpu.toml", "configs/presets/test.toml"} <= set(names)
    for folder in ("configs", "scheduler", "engine", "server"):
        python_files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert python_files <= set(names)
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "engine").rglob("*.cpp")}
    assert kernels <= set(names)
    assert "server/commands/bench/quality.txt" in names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "server/page").glob("*.*")} <= set(names)
    assert not any(re.search(r"(^|/)tests?/", name) for name in names)
