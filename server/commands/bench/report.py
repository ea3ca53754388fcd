"""What every benchmark prints: a table, then one line of JSON with the machine and the versions."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from configs.settings import EngineConfig
from engine.machine import free_memory, usable_cores
from engine.messages import CoreReady
from server.version import version


def print_report(benchmark: str, config: EngineConfig, body: Mapping[str, Any]) -> None:
    """The last line: the figures, and what they were measured on."""
    document = {
        "benchmark": benchmark,
        "model": config.model,
        **body,
        "hardware": hardware(),
        "versions": {"octavo": version(), "python": platform.python_version(), "torch": metadata.version("torch")},
        "settings": msgspec.to_builtins(config),
    }
    print(json.dumps(document))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Right-aligned; the caller rounds."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_row(cells: Sequence[object]) -> None:
    """A row of a table whose rows come one by one."""
    print("".join(f"{cell:>12}" for cell in cells), flush=True)


def engine_facts(info: CoreReady) -> dict[str, Any]:
    """What runs, as the engine says."""
    names = ("dtype", "quantization", "device", "attention_backend", "num_threads")
    return {name: getattr(info, name) for name in names}


def hardware() -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "machine": platform.machine(),
        "usable_cores": usable_cores(),
        "free_memory_gib": round(free_memory() / 2**30, 1),
        "system": platform.platform(),
    }


def processor_name() -> str:
    """The kernel's name for the CPU (Linux), else the platform's."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
