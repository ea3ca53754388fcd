"""The figures of `octavo bench serve` and `octavo bench sweep`: what they are made of, saved, compared and searched."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from server import cli
from server.commands.bench import measure
from server.commands.bench.measure import ClientHealth
from tests.server.bench_command import SMALL, bench, trust_client
from tests.server.fake_openai_server import Behaviour, fake_server

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _trusted_client(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_client(monkeypatch)


def saved_by(capsys: pytest.CaptureFixture[str], folder: Path, *argv: str) -> dict[str, Any]:
    """The document with the details of each request."""
    files = ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "a.json"]
    bench(capsys, *argv, *files)
    document: dict[str, Any] = json.loads((folder / "a.json").read_text())
    return document


def test_figures_are_those_of_the_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = ["--num-prompts", "30", "--max-concurrency", "4", "--metric-percentiles", "50,99"]
    options = ["--goodput", "ttft:25", "e2el:60", "--output-len", "1-9", "--input-len", "4-9"]
    with fake_server(Behaviour(first=0.02, between=0.005, fail={3: "refuse", 9: "break"}.get)) as url:
        found = saved_by(capsys, tmp_path, "serve", url, "--disable-tqdm", *load, *options)
    whole = [index for index, error in enumerate(found["errors"]) if not error]
    ttfts, latencies, output_lens = (
        [found[name][index] for index in whole] for name in ("ttfts", "latencies", "output_lens")
    )
    assert (found["completed"], found["failed"]) == (len(whole), 30 - len(whole))
    assert found["total_input_tokens"] == sum(found["input_lens"][index] for index in whole)
    assert found["total_output_tokens"] == sum(output_lens)
    assert found["request_throughput"] == pytest.approx(len(whole) / found["duration"])
    assert found["output_throughput"] == pytest.approx(sum(output_lens) / found["duration"])
    tokens = found["total_input_tokens"] + sum(output_lens)
    assert found["total_token_throughput"] == pytest.approx(tokens / found["duration"])
    assert (
        found["max_output_tokens_per_s"]
        <= sum(output_lens)
        <= found["max_output_tokens_per_s"] * (math.ceil(found["duration"]))
    )
    tpots = [
        (latency - ttft) / (tokens - 1)
        for latency, ttft, tokens in zip(latencies, ttfts, output_lens, strict=True)
        if tokens > 1
    ]
    itls = [gap for index in whole for gap in found["itls"][index]]
    for metric, seconds in {"ttft": ttfts, "e2el": latencies, "tpot": tpots, "itl": itls}.items():
        figures = {f"mean_{metric}_ms": np.mean(seconds), f"median_{metric}_ms": np.median(seconds)}
        figures |= {f"std_{metric}_ms": np.std(seconds), f"p50_{metric}_ms": np.median(seconds)}
        figures[f"p99_{metric}_ms"] = np.percentile(seconds, 99)
        assert {name: found[name] for name in figures} == pytest.approx({n: 1e3 * x for n, x in figures.items()})
    good = sum(ttft <= 0.025 and latency <= 0.06 for ttft, latency in zip(ttfts, latencies, strict=True))
    assert found["request_goodput"] == pytest.approx(good / found["duration"])
    assert found["good_share"] == pytest.approx(good / 30)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_variance_that_were_asked_for(
    burstiness: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Start times are those at which requests were due, however late this client is."""
    load = ["--request-rate", "200", "--num-prompts", "400", "--burstiness", str(burstiness)]
    sizes = ["--input-len", "1", "--output-len", "1", "--disable-tqdm", "--max-concurrency", "8"]
    with fake_server(Behaviour()) as url:
        times = saved_by(capsys, tmp_path, "serve", url, *sizes, *load)["start_times"]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 200, rel=0.02)
    assert variance(gaps) == pytest.approx((1 / 200) ** 2 / burstiness, rel=0.3)


@pytest.mark.parametrize("repeats", [2, 3])
def test_repeats_are_added_or_averaged(repeats: int, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts", "4", "--max-concurrency", "2", "--repeats", str(repeats)]
    with fake_server(Behaviour(first=0.005, between=0.002)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, *load)
    each = report["repeats"]
    assert report["completed"] == sum(run["completed"] for run in each) == 4 * repeats
    assert report["peak_concurrent_requests"] == max(run["peak_concurrent_requests"] for run in each)
    values = [run["mean_itl_ms"] for run in each]
    half = {2: 12.706, 3: 4.303}[repeats] * stdev(values) / math.sqrt(repeats)
    assert report["mean_itl_ms"] == pytest.approx(fmean(values))
    assert report["confidence_95"]["mean_itl_ms"] == pytest.approx([fmean(values) - half, fmean(values) + half])
    assert report["request_goodput"] is None


def test_a_rate_is_kept_and_repeats_have_confidence(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--request-rate", "100", "--num-prompts", "40", "--repeats", "3", "--goodput", "ttft:500", "tpot:500"]
    with fake_server(Behaviour()) as url:
        text, report = bench(capsys, "serve", url, *SMALL, *load)
    assert report["completed"] == 120
    assert len(report["repeats"]) == 3
    assert report["request_throughput"] == pytest.approx(100, rel=0.15)
    assert report["request_goodput"] == pytest.approx(report["request_throughput"])
    low, high = report["confidence_95"]["mean_ttft_ms"]
    assert low < report["mean_ttft_ms"] < high
    assert " ± " in text


def test_what_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    files = ["--save-result", "--save-detailed", "--plot-timeline", "--result-dir", str(folder)]
    load = ["--num-prompts", "9", "--request-rate", "40,80", "--goodput", "ttft:100", "--result-filename", "a.json"]
    with fake_server(Behaviour(fail={2: "refuse"}.get)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, *files, *load, "--html", str(tmp_path / "b.html"))
    saved = json.loads((folder / "a.json").read_text())
    assert [run["request_rate"] for run in saved["runs"]] == [40, 80]
    for run in saved["runs"]:
        columns = (
            "input_lens",
            "output_lens",
            "ttfts",
            "itls",
            "start_times",
            "queue_times",
            "generated_texts",
            "errors",
        )
        assert {len(run[name]) for name in columns} == {9}
    first = saved["runs"][0]
    assert [bool(error) for error in first["errors"]].count(True) == 1
    assert sum(first["output_lens"]) == first["total_output_tokens"]
    assert first["generated_texts"][0] == " w0 w1 w2 w3"
    assert "ttfts" not in report["runs"][0]

    html = (folder / "a.html").read_text()
    assert html == (tmp_path / "b.html").read_text()
    assert "http" not in html.replace(url, "").lower().replace("http 503", "")
    page = ElementTree.fromstring(html.partition("\n")[2])
    titles = [figure.findtext("figcaption") or "" for figure in page.iter("figure")]
    assert [title.split(",")[0].split()[0] for title in titles] == ["Latency"] + [
        "Percentiles",
        "Timeline",
        "Requests",
    ] * 2
    rates, percentiles, timeline, _ = list(page.iter("figure"))[:4]
    assert {"median TTFT", "P99 E2EL", "limit of TTFT"} <= {text.text for text in rates.iter("text")}
    assert all(len((line.get("points") or "").split()) == 2 for line in rates.iter("polyline"))
    assert len(list(percentiles.iter("polyline"))) == 4
    assert len([row for row in timeline.iter("title") if (row.text or "").startswith("request")]) == 9
    for line in page.iter("polyline"):
        for x, y in (map(float, point.split(",")) for point in (line.get("points") or "").split()):
            assert 63 <= x <= 601
            assert 15 <= y <= 273


def test_ratios_of_two_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow, fast = Behaviour(first=0.04, between=0.02), Behaviour(first=0.02, between=0.01)
    load = ["--num-prompts", "4", "--max-concurrency", "2", "--html", str(tmp_path / "a.html")]
    with fake_server(slow) as url, fake_server(fast) as other:
        text, report = bench(capsys, "serve", url, "--compare", other, *SMALL, *load)
    ratios = report["ratios"]
    for name in ("median_ttft_ms", "median_itl_ms", "median_e2el_ms"):
        low, high = ratios[name]["confidence_95"]
        assert low <= ratios[name]["ratio"] <= high
        assert 0.2 < ratios[name]["ratio"] < 0.9
    assert ratios["output_throughput"]["ratio"] == pytest.approx(1 / ratios["mean_e2el_ms"]["ratio"], rel=0.1)
    assert [server["completed"] for server in report["servers"]] == [12, 12]
    assert "B / A" in text
    [sizes, others] = [[len(body["prompt"]) for body in each.bodies] for each in (slow, fast)]
    assert sizes == others
    assert not {str(body["prompt"]) for body in slow.bodies} & {str(body["prompt"]) for body in fast.bodies}
    pairs = zip(*([run["mean_itl_ms"] for run in server["repeats"]] for server in report["servers"]), strict=True)
    assert ratios["mean_itl_ms"]["ratio"] == pytest.approx(math.exp(fmean(math.log(b / a) for a, b in pairs)))


def test_a_ramp_sends_faster_and_faster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "20", "--ramp-up-end-rps", "200"]
    files = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "a.json"]
    with fake_server(Behaviour()) as url:
        bench(capsys, "serve", url, *SMALL, "--num-prompts", "40", "--burstiness", "inf", *ramp, *files)
    times = json.loads((tmp_path / "a.json").read_text())["start_times"]
    rates = [1 / (later - earlier) for earlier, later in pairwise(times)]
    assert sum(rates[:5]) / 5 < 60 < 120 < sum(rates[-5:]) / 5


def test_a_sweep_finds_the_capacity(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two places and 40 ms per request: 50 requests per second."""
    limits = ["--goodput", "e2el:120", "--duration", "1", "--start-rate", "10", "--precision", "0.2"]
    with fake_server(Behaviour(first=0.04, places=2)) as url:
        text, report = bench(capsys, "sweep", url, *SMALL, *limits, "--html", str(tmp_path / "a.html"))
    assert 25 <= report["highest_rate"] <= 60
    assert report["highest_rate"] < report["lowest_rate_not_held"] <= 1.2 * report["highest_rate"]
    rates = [run["request_rate"] for run in report["runs"]]
    assert rates == sorted(rates)
    held = [run["good_share"] >= 0.9 for run in report["runs"]]
    assert held == [rate <= report["highest_rate"] for rate in rates]
    assert "is the highest rate that kept 90% of the requests within e2el:120 ms" in text
    assert "limit of E2EL" in (tmp_path / "a.html").read_text()


def test_a_sweep_ends_at_the_rate_that_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--goodput", "e2el:60000", "--duration", "0.01", "--start-rate", "100", "--max-rate", "150"]
    with fake_server(Behaviour()) as url:
        _, report = bench(capsys, "sweep", url, *SMALL, *limits)
    assert (report["highest_rate"], report["lowest_rate_not_held"]) == (150, None)
    assert [run["request_rate"] for run in report["runs"]] == [100, 150]


def test_a_sweep_without_a_rate_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--goodput", "ttft:1", "--duration", "0.02", "--start-rate", "100"]
    with fake_server(Behaviour(first=0.02)) as url:
        text, report = bench(capsys, "sweep", url, *SMALL, *limits, code=1)
    assert report["highest_rate"] is None
    assert "No rate kept" in text
    assert "even one request at a time" in report["ended_early"]
    assert any("ended early" in note for run in report["runs"] for note in run["notes"])


def test_ctrl_c_prints_what_was_measured() -> None:
    command = [sys.executable, "-m", "server.cli", "bench", "serve"]
    behaviour = Behaviour(first=0.02)
    with fake_server(behaviour) as url:
        load = ["--request-rate", "20", "--num-prompts", "10000", *SMALL]
        process = subprocess.Popen(
            [*command, url, *load],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in the background
        )
        until = time.monotonic() + 60
        while len(behaviour.bodies) < 10 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    report = json.loads(out.splitlines()[-1])
    assert 5 <= report["completed"] <= 600
    assert report["interrupted"]
    assert "interrupted: requests that were under way are left out" in out


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which has the signal ignored there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(number: int) -> Behaviour:
    """Ctrl-C arrives while the request of this number is under way; those before the runs count too."""

    def fail(current: int) -> str | None:
        if current != number:
            return None
        os.kill(os.getpid(), signal.SIGINT)
        return "silent"

    return Behaviour(fail=fail)


TWO = ["--num-prompts", "2", "--max-concurrency", "1"]


@pytest.mark.parametrize(
    ("run", "completed"),
    [(1, [2, 0]), (2, [2, 2]), (3, [2, 2]), (5, [4, 4])],
    ids=["B", "B again", "A again", "A third"],
)
def test_an_interrupted_comparison_prints_its_whole_pairs(
    run: int, completed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(interrupted_at(2 + 2 * run)) as url:
        _, report = bench(capsys, "serve", url, "--compare", url, *SMALL, *TWO, code=130)
    assert [server["completed"] for server in report["servers"]] == completed


def test_a_comparison_interrupted_at_once_prints_its_half(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(interrupted_at(3)) as url:
        assert cli.main(["bench", "serve", url, "--compare", url, *SMALL, *TWO]) == 130
    text = capsys.readouterr().out
    assert text.startswith("A:\n")
    assert "B:" not in text


def test_an_interrupted_sweep_and_an_interrupted_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--goodput", "ttft:10000", "--duration", "0.1", "--start-rate", "100"]
    with fake_server(interrupted_at(12)) as url:
        text, report = bench(capsys, "sweep", url, *SMALL, *options, code=130)
    assert (report["highest_rate"], report["ended_early"], len(report["runs"])) == (100, "interrupted", 2)
    assert "the search ended early: interrupted" in text

    with fake_server(interrupted_at(5)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, *TWO, "--repeats", "4", code=130)
    assert report["completed"] == 4
    assert report["interrupted"]


# --- the client -----------------------------------------------------------------------------------------------------

STEADY, SELDOM = [0.0005] * 1000, [0.0005] * 980 + [0.03] * 20


@pytest.mark.parametrize(
    ("lags", "late_sends", "wrong"),
    [
        (STEADY, STEADY, set()),
        (SELDOM, STEADY, {"itl p99"}),
        (STEADY, SELDOM, set()),
        (STEADY, [0.05] * 9, {"ttft mean", "ttft p99"}),
    ],
)
def test_figures_are_wrong_that_the_clients_lateness_reaches(
    lags: list[float], late_sends: list[float], wrong: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 ms to the first token, one every 100 ms, and 1.4 s in all."""
    monkeypatch.undo()
    health = ClientHealth()
    health.loop_lags, health.late_sends = lags, late_sends
    values = {"ttft": 0.4, "tpot": 0.1, "itl": 0.1, "e2el": 1.4}
    kinds = {"mean": np.mean, "p99": measure.percentile(99)}
    found = {f"{m} {k}" for m, x in values.items() for k, kind in kinds.items() if health.why_wrong(m, kind, x)}
    assert found == wrong


@contextmanager
def busy_interpreter() -> Iterator[None]:
    """Another thread keeps the interpreter for 20 ms at a time."""
    ended, interval = threading.Event(), sys.getswitchinterval()

    def work() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    sys.setswitchinterval(0.02)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_client_that_was_late_prints_no_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with fake_server(Behaviour(first=0.01)) as url, busy_interpreter():
        text, report = bench(capsys, "serve", url, *SMALL, "--request-rate", "20", "--num-prompts", "10", code=1)
    assert report["client"]["bottleneck"]
    assert report["mean_ttft_ms"] is report["p99_e2el_ms"] is report["request_throughput"] is None
    assert "THE CLIENT WAS THE BOTTLENECK" in text
    assert "Mean TTFT (ms):                          not valid" in text
    assert report["completed"] == 10


def test_a_sweep_that_the_client_spoils_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_SHARE_OF_FIGURE", "CLOCK_STEP"):
        monkeypatch.setattr(measure, name, -1.0)
    with fake_server(Behaviour()) as url:
        _, report = bench(capsys, "sweep", url, *SMALL, "--goodput", "e2el:900", "--duration", "0.01", code=1)
    assert report["highest_rate"] is None
    assert "the client was" in report["ended_early"]


def test_the_thresholds_are_those_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    for value in (f"{measure.MAX_CPU_SHARE:.0%}", f"{measure.MAX_SHARE_OF_FIGURE:.0%}"):
        assert value.replace("%", " %") in text
    assert f"{measure.CLOCK_STEP * 1e3:g} ms" in text
