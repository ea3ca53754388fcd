"""One server process for clients in their own environment, which `make test-clients` sets up.

The server runs in the project's environment, from its command; nothing here imports the project. No test needs a
network: model hubs are switched off, and the tokenizer that load testers want is made out of the bundled checkpoint.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HF_FOLDER = ROOT / "build" / "clients" / "smollm2"
OCTAVO = ROOT / ".venv" / "bin" / "octavo"

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": str(ROOT / "build" / "clients" / "hf"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
}


@contextlib.contextmanager
def serving(log: Path, *arguments: str) -> Iterator[str]:
    """`octavo serve ARGUMENTS` on a free port, as a process of its own; gives its URL without `/v1`."""
    with log.open("wb") as output:
        process = subprocess.Popen([OCTAVO, "serve", *arguments, "--port", "0"], stdout=output, stderr=output)
    try:
        yield _url(process, log)
    finally:
        process.terminate()
        process.wait(30)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """What the start-up message tells; it appears once requests are answered."""
    deadline = time.monotonic() + 60
    while not (told := re.search(r"^Serving on (http://[\w.]+:\d+)", log.read_text(), re.MULTILINE)):
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)
    return told[1]


def run(command: list[str | Path], cwd: Path = ROOT, **environment: str | None) -> None:
    """Run a client to its end, which must be a good one; an environment variable of None is removed."""
    variables = {name: value for name, value in (os.environ | environment).items() if value is not None}
    done = subprocess.run(
        command, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bundled checkpoint served as by `make serve`, under the name smollm2."""
    with serving(tmp_path_factory.mktemp("server") / "log", "smollm2") as address:
        yield address


@pytest.fixture(scope="session")
def hf_folder() -> Path:
    """The bundled checkpoint as transformers reads it: weights in float32, tokenizer, chat template."""
    if not (HF_FOLDER / "config.json").is_file():
        run([sys.executable, Path(__file__).with_name("gguf_to_hf_folder.py"), CHECKPOINT, HF_FOLDER])
    return HF_FOLDER
