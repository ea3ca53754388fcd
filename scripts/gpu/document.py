"""The JSON document: where the check ran, and what it found."""

import json
import math
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from .plan import Plan

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "numpy", "transformers", "msgspec", "xformers")


def environment(plan: Plan) -> dict[str, Any]:
    """Asks the driver by its own tool: this process must not touch the device."""
    gpu = [] if plan.is_dry else _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = gpu[0].partition(", ") if gpu else ("", "", "")
    return {
        "gpu": name or None,
        "driver": driver or None,
        "commit": next(iter(_lines("git", "-C", str(ROOT), "describe", "--always", "--dirty")), None),
        "python": platform.python_version(),
        "dry": plan.is_dry,
        **{package: _version(package) for package in PACKAGES},
    }


def write(document: dict[str, Any], folder: Path) -> int:
    """Print it as the last line, write it to `folder`; returns the exit status."""
    _summarise(document)
    text = json.dumps(rounded(document))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_check.json").write_text(text + "\n")
    print(text, flush=True)
    return 1 if document["failed"] else 0


def rounded(value: Any) -> Any:
    """Floats with five digits; JSON knows no NaN."""
    match value:
        case dict():
            return {key: rounded(entry) for key, entry in value.items()}
        case list() | tuple():
            return [rounded(entry) for entry in value]
        case float():
            return float(f"{value:.5g}") if math.isfinite(value) else str(value)
        case _:
            return value


def _summarise(document: dict[str, Any]) -> None:
    print(f"\n{'section':<29}{'status':<10}{'seconds':>8}{'checks':>8}{'failed':>8}{'figures':>9}{'skipped':>9}")
    for name, section in document["sections"].items():
        events = section["events"]
        kinds = [sum(event["event"] == kind for event in events) for kind in ("check", "measurement", "skipped")]
        failed = sum(not event.get("passed", True) for event in events)
        counts = f"{kinds[0]:>8}{failed:>8}{kinds[1]:>9}{kinds[2]:>9}"
        print(f"{name:<28} {section['status']:<10}{section['seconds']:>8.1f}{counts}")
    for target in document["targets"]:
        measured = "" if target["measured"] is None else f"{target['measured']:.4g} of "
        print(f"{target['verdict']:<13}{target['what']}: {measured}{target['wanted']:.4g} {target['unit']}")
    print(f"failed: {', '.join(document['failed']) or 'nothing'}", flush=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lines(*command: str) -> list[str]:
    """What a program prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
