"""scripts/gpu_check.py without a GPU: its dry form, and that it finds what is wrong."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.torch_reference import TorchReferenceAttention
from scripts.gpu.attention_cases import make_spec
from scripts.gpu.attention_checks import check
from scripts.gpu.bench import Bench, Event
from scripts.gpu.document import rounded, write
from scripts.gpu.plan import Plan
from scripts.gpu.wheels import provide

ROOT = Path(__file__).parents[1]

ABSENT = ("zmq", "gguf", "xgrammar", "uvicorn", "starlette", "pydantic", "openai", "httptools", "uvloop", "xformers")
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
"""


def run(*arguments: str, folder: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """On a machine that has none of `ABSENT`."""
    (folder / "sitecustomize.py").write_text(BLOCKER)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OUT": str(folder)}
    command = ["-c", code] if code else [str(ROOT / "scripts" / "gpu_check.py"), *arguments]
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def last_line(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document


@pytest.mark.timeout(240)
def test_the_dry_form_runs_every_section_and_finds_nothing_wrong(tmp_path: Path) -> None:
    result = run("--dry", folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    document = last_line(result)
    assert document == json.loads((tmp_path / "gpu_check.json").read_text())
    assert document["failed"] == []
    assert document["environment"]["torch"] == torch.__version__
    sections = document["sections"]
    assert {name: section["status"] for name, section in sections.items()} == dict.fromkeys(sections, "done")
    kinds = {name: {event["event"] for event in section["events"]} for name, section in sections.items()}
    for name in ("attention_triton", "attention_torch_reference", "sampling", "models", "engine"):
        assert "check" in kinds[name]
    for name in ("ceilings", "model_speed", "workload", "attention_speed", "peer", "tuning"):
        assert "measurement" in kinds[name]
    assert {target["verdict"] for target in document["targets"]} == {"not measured"}  # the shapes are others


def test_a_section_that_breaks_or_hangs_is_reported_and_the_others_run(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from scripts.gpu import sections
from scripts.gpu.document import write
from scripts.gpu.plan import Plan

sections.GRACE = 0.3

def works(bench): bench.measure("after", rate=1.0)
def breaks(bench): os._exit(7)
def hangs(bench): time.sleep(60)
def raises(bench): bench.check("before", 0.1, 1.0); raise KeyError("lost")
def measures(bench): bench.measure("own", rate=bench.ceilings["after"])

steps = [sections.Section(function.__name__, 0.5, function) for function in (breaks, hangs, raises)]
steps = [sections.Section("ceilings", 9, works, is_timed=True), *steps]
steps += [sections.Section("peer", 9, breaks, is_timed=True, must_work=False)]
steps += [sections.Section("last", 9, measures, is_timed=True)]
sys.exit(write(sections.run_all(steps, Plan(is_dry=True), 30.0), Path(os.environ["OUT"])))
"""
    result = run(folder=tmp_path, code=code)
    assert result.returncode == 1, result.stderr
    document = last_line(result)
    sections = document["sections"]
    assert [sections[name]["status"] for name in ("breaks", "hangs", "raises")] == ["failed", "ended", "failed"]
    assert "7" in sections["breaks"]["reason"]
    assert [event["what"] for event in sections["raises"]["events"]] == ["before"]
    assert sections["last"]["events"][0]["rate"] == 1.0
    assert document["failed"] == ["breaks", "hangs", "raises"]


def test_importing_it_touches_no_device(tmp_path: Path) -> None:
    """A process that has touched one cannot be forked."""
    code = """
import torch
def touched(*args, **kwargs): raise AssertionError("a device was asked for")
for name in ("is_available", "device_count", "_lazy_init", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, name, touched)
import scripts.gpu.sections
"""
    result = run(folder=tmp_path, code=code)
    assert result.returncode == 0, result.stderr


class ForgetsTheWindow(TorchReferenceAttention):
    def forward(self, layer, q):
        return super().forward(0, q)


class ForgetsTheLastKey(TorchReferenceAttention):
    def prepare(self, metadata):
        metadata.seq_lens[metadata.seq_lens > 1] -= 1
        super().prepare(metadata)


class ComputesNothing(TorchReferenceAttention):
    def forward(self, layer, q):
        return torch.full_like(q, torch.nan)


class KeepsTheFirstLengths(TorchReferenceAttention):
    """Of the steps of one query: what was right when it was captured."""

    captures_decode = True


def findings(backend: type) -> list[Event]:
    events: list[Event] = []
    spec = make_spec((2, 1, 16), "cpu", block_size=16, windows=(None, 9), dtype=torch.float32)
    bench = Bench("attention", Plan(is_dry=True), 60.0, events.append)
    check(bench, backend, spec, "small")
    return events


@pytest.mark.parametrize("backend", [ForgetsTheWindow, ForgetsTheLastKey, ComputesNothing, KeepsTheFirstLengths])
def test_a_wrong_backend_fails_its_check(backend: type) -> None:
    assert [event["passed"] for event in findings(backend)][-1] is False


def test_a_right_backend_passes() -> None:
    assert [event["passed"] for event in findings(TorchReferenceAttention)] == [True]


def test_a_failed_check_decides_the_exit_status(tmp_path: Path) -> None:
    document: dict[str, Any] = {"sections": {}, "targets": [], "failed": []}
    assert write(document, tmp_path) == 0
    assert write(document | {"failed": ["attention: small"]}, tmp_path) == 1


def test_the_document_is_json_where_a_figure_is_no_number() -> None:
    text = json.dumps(rounded({"error": float("nan"), "rates": [1 / 3, float("inf")]}), allow_nan=False)
    assert json.loads(text) == {"error": "nan", "rates": [0.33333, "inf"]}


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A folder with the wheel of a package that is not installed, for a Python; `sys.path` is restored."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(tag: str) -> Path:
        with zipfile.ZipFile(tmp_path / f"carried_probe-1.0-{tag}-{tag}-any.whl", "w") as wheel:
            wheel.writestr("carried_probe/__init__.py", "ANSWER = 42\n")
        return tmp_path

    return make


def test_a_missing_package_comes_from_a_wheel(carried: Callable[[str], Path], tmp_path: Path) -> None:
    wheels = carried(f"cp{sys.version_info.major}{sys.version_info.minor}")
    provide("carried_probe", wheels, tmp_path / "unpacked")
    import carried_probe

    assert carried_probe.ANSWER == 42


def test_without_a_fitting_wheel_it_says_how_to_fetch_one(carried: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"pip download .* --python-version 3\.\d+ -d .* carried_probe2"):
        provide("carried_probe2", carried("cp27"), tmp_path / "unpacked")


def test_every_target_is_a_figure_that_a_run_measures() -> None:
    from scripts.gpu import attention_speed, model_speed, targets

    speeds = [
        {"event": "measurement", "what": f"{name} {kind} {batch} x {context}", figure: 0.7}
        for name in model_speed.MODELS
        for batch, context in model_speed.BATCHES
        for kind, figure in (("decode", "of_bandwidth"), ("prefill", "of_matrix_rate"))
    ]
    attention = [
        {
            "event": "measurement",
            "what": f"triton {shape.name}",
            "backend": "triton",
            "kind": shape.kind,
            "megabytes": shape.kv_bytes / 1e6,
            "of_bandwidth": 0.69,
            "teraflops": 401.0,
        }
        for shape in attention_speed.SHAPES
    ]
    assert len({row["what"] for row in speeds + attention}) == len(speeds + attention)
    rate = {"event": "measurement", "what": "nano-vllm", "output_tokens_per_second": 19999.0}
    found = {"model_speed": speeds, "attention_speed": attention, "workload": [rate]}
    rows = targets.compare({name: {"events": events} for name, events in found.items()})
    assert [row["verdict"] for row in rows] == ["missed", "reached", "reached", "missed", "reached", "missed"]
