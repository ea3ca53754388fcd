"""`octavo bench serve` and `octavo bench sweep` within the test's process, against a server on another thread."""

import json
from typing import Any

import pytest

from server import cli
from server.commands.bench import measure

SMALL = ["--input-len", "8", "--output-len", "4", "--disable-tqdm"]


def trust_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server shares the interpreter with the client, so that the client's lateness says nothing."""
    for name in ("MAX_CPU_SHARE", "CLOCK_STEP"):
        monkeypatch.setattr(measure, name, float("inf"))


def bench(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """What is printed for people, and the JSON document."""
    assert cli.main(["bench", *argv]) == code, capsys.readouterr().err
    *text, last = capsys.readouterr().out.splitlines()
    return "\n".join(text), json.loads(last)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that is said instead of a run."""
    assert cli.main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err
