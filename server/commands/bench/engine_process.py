"""Measurements inside the engine run in a process of their own, which imports torch: see engine/bench."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import UsageError
from configs.settings import EngineConfig
from engine.machine import core_variables, usable_cores

_ROOT = Path(__file__).parents[3]


def measure(what: str, config: EngineConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `engine/bench/WHAT.py`. Raises `UsageError` with its one line when it cannot measure."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.bench", what],
        input=json.dumps({"config": msgspec.to_builtins(config), "options": options}).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, **core_variables(config.num_threads or usable_cores()), "PYTHONPATH": path},
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 2) or not lines:
        raise UsageError(f"the measuring process ended with status {done.returncode}; see its messages above")
    answer: dict[str, Any] = json.loads(lines[-1])
    if done.returncode:
        raise UsageError(answer["error"])
    return answer
