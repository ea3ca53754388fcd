"""`octavo bench kernels MODEL` and `octavo bench quality MODEL`: measurements inside the engine.

They run in a process of their own, which imports torch: see engine/bench.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import UsageError
from configs.settings import EngineConfig
from engine.machine import core_variables, module_environment, usable_cores

from .report import print_lines, print_report

TEXT = Path(__file__).with_name("quality.txt")
COLUMNS = ("kernel", "rows", "ms", "GB/s", "GFLOP/s", "limit", "% of limit", "% of step")
QUALITY = {
    "positions": "{:,}",
    "kl_divergence": "{:.5f}",
    "kl_divergence_p99": "{:.5f}",
    "same_likeliest": "{:.2%}",
    "perplexity_float32": "{:.4f}",
    "perplexity": "{:.4f}",
}


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Print the figures of the benchmark that `arguments.bench` names."""
    (_kernels if arguments.bench == "kernels" else _quality)(config, arguments)
    return 0


def _kernels(config: EngineConfig, arguments: argparse.Namespace) -> None:
    """Each C++ kernel, on the model's own weights, against what the machine can do."""
    options = {name: getattr(arguments, name) for name in ("rows", "context", "repeats")}
    report = _measure("kernels", config, options)
    print_lines(report["ceilings"], dict.fromkeys(report["ceilings"], "{:,.1f}"))
    for step in report["steps"]:
        print(f"\n{step['what']}: {step['ms']:.2f} ms, of which {step['other_ms']:.2f} ms outside the kernels")
        _print_table(COLUMNS, [[_cell(value) for value in kernel.values()] for kernel in step["kernels"]])
    print_report("kernels", config, report)


def _quality(config: EngineConfig, arguments: argparse.Namespace) -> None:
    """What the weights' and activations' type costs, against float32, on a text."""
    path = Path(arguments.text or TEXT)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path}: {error}") from error
    report = _measure("quality", config, {"text": text, "window": arguments.window})
    print_lines(report, QUALITY)
    print_report("quality", config, {"text": path.name, **report})


def _measure(what: str, config: EngineConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `engine/bench/WHAT.py`. Raises `UsageError` with its one line when it cannot measure."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.bench", what],
        input=json.dumps({"config": msgspec.to_builtins(config), "options": options}).encode(),
        stdout=subprocess.PIPE,
        env=module_environment(core_variables(config.num_threads or usable_cores())),
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 2) or not lines:
        raise UsageError(f"the measuring process ended with status {done.returncode}; see its messages above")
    answer: dict[str, Any] = json.loads(lines[-1])
    if done.returncode:
        raise UsageError(answer["error"])
    return answer


def _cell(value: object) -> str:
    return "–" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
