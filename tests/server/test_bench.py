"""The benchmarks: flags, work, and each of them once for real."""

import json
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from engine.kernels.cpu.build import KernelsUnavailable, load_library
from server import cli
from server.commands.bench.offline import measure_batch
from tests.engine.tiny_models import write_tiny
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "server" / "commands" / "bench" / "quality.txt"
HARDWARE = {"processor", "machine", "usable_cores", "free_memory_gib", "system"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


def run_bench(*argv: str) -> tuple[str, dict[str, Any]]:
    """What is printed for people, and the JSON document."""
    run = subprocess.run(
        [sys.executable, "-m", "server.cli", "bench", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    *table, last = run.stdout.splitlines()
    report = json.loads(last)
    assert set(report["hardware"]) == HARDWARE
    assert set(report["versions"]) == {"octavo", "python", "torch"}
    assert report["benchmark"] == argv[0]
    return "\n".join(table), report


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["throughput", "--num-prompts", "0"], ["--num-prompts"]),
        *(
            (["throughput", "--input-len", text], ["--input-len"])
            for text in ("0", "x", "", "7-", "9-3", "1-2-3", "1.5")
        ),
        (["throughput", "--dataset", "/nowhere"], ["--dataset /nowhere"]),
        (["throughput", "--batch-sizes", "1"], ["--batch-sizes"]),
        (["latency", "--batch-sizes", "1,"], ["--batch-sizes", "''"]),
        (["latency", "--batch-size", "1"], ["did you mean --batch-sizes?"]),
        (["latency", "--output-len", "1"], ["--output-len"]),
        (["latency", "--no-enable-prefix-caching"], ["prefix caching"]),
        (["latency", "--batch-sizes", "300"], ["--batch-sizes", "256"]),
        (["quality", "--text", "/nowhere"], ["--text /nowhere"]),
        (["quality", "/nowhere"], ["/nowhere"]),
        (["streaming", "--step-ms", "-1"], ["--step-ms"]),
    ],
)
def test_refusals_are_one_line(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


async def test_a_batch_is_sent_cold_and_then_cached() -> None:
    engine = FakeEngine(lambda prompt, params: "x" * 9)
    engine.delay = 0.001
    ttft, tpot = await measure_batch(engine, random.Random(0), 3, 5, 4)
    assert ttft > 0.9 * engine.delay
    assert tpot > 0.9 * engine.delay
    prompts = [tuple(token_ids) for _, token_ids, *_ in engine.requests]
    assert [params.max_tokens for _, _, params, *_ in engine.requests] == [1, 1, 1, 4, 4, 4]
    assert prompts[:3] == prompts[3:]
    assert len(set(prompts)) == 3


def test_throughput_for_real() -> None:
    sizes = ["--num-prompts", "3", "--input-len", "4-8", "--output-len", "4"]
    _, report = run_bench("throughput", "smollm2", "--config", "test", *sizes)
    assert (report["requests"], report["output_tokens"]) == (3, 12)
    assert 12 <= report["prompt_tokens"] <= 24
    assert report["output_tokens_per_second"] > 0


def test_throughput_of_a_file(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": "b", "more": 1}\n')
    options = [str(tiny), "--config", "test", "--dataset", str(file), "--output-len", "5"]
    _, report = run_bench("throughput", *options)
    assert (report["requests"], report["output_tokens"]) == (2, 3 + 5)
    for text, word in [('{"prompt": 1}', "line 1"), ("", "no prompts"), ("x", "line 1"), ('{"prompt": [1]}', "texts")]:
        file.write_text(text)
        assert cli.main(["bench", "throughput", *options]) == 2
        assert word in capsys.readouterr().err


def test_latency_for_real_and_its_plots(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--batch-sizes", "1,3", "--input-lens", "8,40", "--output-len", "100", "--repeats", "1"]
    table, report = run_bench("latency", str(tiny), "--config", "test", *sizes)
    assert [(each["input_len"], each["batch_size"]) for each in report["results"]] == [(8, 1), (8, 3), (40, 1), (40, 3)]
    assert all(each["ttft_ms"] > 0 and each["tpot_ms"] > 0 for each in report["results"])
    assert len(table.splitlines()) == 5

    file = tmp_path / "latency.txt"
    file.write_text(f"{table}\n{json.dumps(report)}\n")
    script = ROOT / "scripts" / "plot_performance.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(file), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    for name, words in [("batch-size", "8 tokens of context"), ("context", "batch 3")]:
        root = ElementTree.parse(tmp_path / f"cost-by-{name}.svg").getroot()
        assert len(root.findall("{*}polyline")) == 2
        assert words in "".join(root.itertext())


def test_latency_refuses_what_the_cache_cannot_hold(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-sizes", "2", "--input-lens", "40", "--kv-cache-tokens", "64"]
    assert cli.main(["bench", "latency", str(tiny), "--config", "test", *sizes]) == 2
    assert "KV cache of 64 tokens" in capsys.readouterr().err


def test_kernels_for_real(tiny: Path) -> None:
    try:
        load_library()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    sizes = ["--rows", "1,2", "--context", "32", "--repeats", "1"]
    table, report = run_bench("kernels", str(tiny), "--config", "test", *sizes)
    assert [step["rows"] for step in report["steps"]] == [1, 2, 32]
    assert "attention_output" in table
    assert report["ceilings"]["gigabytes_read_per_second"] > 0


def test_quality_for_real(tiny: Path) -> None:
    table, report = run_bench("quality", str(tiny), "--config", "test", "--text", str(TEXT))
    assert report["kl_divergence"] == 0  # the preset computes in float32
    assert report["perplexity"] == report["perplexity_float32"]
    assert "kl divergence" in table


def test_streaming_for_real(tiny: Path) -> None:
    sizes = ["--streams", "3", "--output-len", "40", "--step-ms", "5"]
    table, report = run_bench("streaming", str(tiny), "--config", "test", *sizes)
    assert (report["streams"], report["output_len"], report["step_ms"]) == (3, 40, 5)
    assert 0.9 < report["tokens_per_event"] < 10
    assert report["us_per_request"] > 0
    assert "us per token" in table
