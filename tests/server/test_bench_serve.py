"""`octavo bench serve` and `octavo bench sweep` against a server whose delays are known."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from server import cli
from server.commands.bench import serve, sweep
from server.commands.bench.load_test import measure, saturation, trial
from tests.server.fake_openai_server import Behaviour, fake_server

ROOT = Path(__file__).parents[2]
SMALL = ["--input-len", "8", "--output-len", "4", "--disable-tqdm"]
NAMES = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"),
    *("mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms"),
    *("date", "backend", "label", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
}


SPOILT = sweep.Sweep._why_wrong


@pytest.fixture(autouse=True)
def _patient_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server shares the interpreter with the client: only one test judges the latter."""
    monkeypatch.setattr(trial, "wrong_figures", lambda *_: {})
    monkeypatch.setattr(sweep.Sweep, "_why_wrong", lambda *_: None)


def bench(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """What is printed for people, and the JSON document."""
    assert cli.main(["bench", *argv]) == code, capsys.readouterr().err
    *text, last = capsys.readouterr().out.splitlines()
    return "\n".join(text), json.loads(last)


def test_a_closed_loop_keeps_its_number_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = Behaviour(first=0.03, between=0.01)
    with fake_server(behaviour) as url:
        text, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "12", "--max-concurrency", "3")
    assert set(report) >= NAMES
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (12, 0, 48)
    assert report["total_input_tokens"] == 96
    assert report["peak_concurrent_requests"] == 3
    assert behaviour.num_connections <= 4
    assert 30 <= report["median_ttft_ms"] < 60
    assert 10 <= report["median_tpot_ms"] < 20
    assert 10 <= report["median_itl_ms"] < 20
    assert report["median_e2el_ms"] == pytest.approx(report["median_ttft_ms"] + 3 * report["median_tpot_ms"], rel=0.2)
    assert report["request_throughput"] == pytest.approx(12 / report["duration"])
    assert "Median TTFT (ms):" in text
    [body] = {json.dumps({**body, "prompt": None}) for body in behaviour.bodies}
    fields = {"model": "fake", "prompt": None, "max_tokens": 4, "ignore_eos": True, "stream": True}
    assert json.loads(body) == {**fields, "stream_options": {"include_usage": True}}
    assert len({str(body["prompt"]) for body in behaviour.bodies}) == 1 + 12  # and the first request of all


def test_a_stall_is_felt_by_all_who_would_have_come(capsys: pytest.CaptureFixture[str]) -> None:
    """A stall of half of a second in which 25 of 50 requests arrive, evenly: they wait 0.25 s on average."""
    rate = ["--request-rate", "50", "--burstiness", "inf", "--num-prompts", "50", "--metric-percentiles", "50,75"]
    with fake_server(Behaviour(stall=(10, 0.5))) as url:
        _, report = bench(capsys, "serve", url, *SMALL, *rate)
    assert report["completed"] == 50
    assert report["mean_ttft_ms"] == pytest.approx(125, rel=0.3)
    assert report["p75_ttft_ms"] == pytest.approx(250, rel=0.3)
    assert report["duration"] < 2


def test_the_wait_for_a_place_counts_at_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """20 requests in 0.2 s, one at a time, 50 ms each: the last one has waited for all."""
    load = ["--request-rate", "100", "--burstiness", "inf", "--num-prompts", "20", "--max-concurrency", "1"]
    metrics = ["--percentile-metrics", "e2el,client_queue_time", "--metric-percentiles", "100"]
    with fake_server(Behaviour(first=0.05)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, *load, *metrics)
    assert report["p100_e2el_ms"] == pytest.approx(20 * 50 - 190, rel=0.25)
    assert report["p100_client_queue_time_ms"] == pytest.approx(19 * 50 - 190, rel=0.25)
    assert report["peak_concurrent_requests"] == 1
    assert report["client"]["p99_late_send_ms"] < 50


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


def test_errors_are_counted_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {1: "refuse", 3: "break", 5: "error", 7: "silent", 8: "refuse"}
    options = ["--num-prompts", "12", "--max-concurrency", "1", "--request-timeout-sec", "0.3"]
    with fake_server(Behaviour(fail=kinds.get)) as url:
        text, report = bench(capsys, "serve", url, *SMALL, *options)
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (7, 5, 28)
    errors = report["error_counts"]
    assert errors["HTTP 503: too busy"] == 2
    assert errors["error within the stream: out of memory"] == 1
    assert errors["no whole answer within 0.3 s"] == 1
    assert sum(errors.values()) == 5
    assert "2 x HTTP 503: too busy" in text


def test_a_run_without_an_answer_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = Behaviour(fail=lambda number: "refuse" if number else None)
    with fake_server(behaviour) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "3", code=1)
    assert (report["completed"], report["failed"], report["mean_ttft_ms"]) == (0, 3, None)


def test_connections_that_the_server_closed_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = Behaviour(closes_after=3)
    with fake_server(behaviour) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "20", "--max-concurrency", "2")
    assert (report["completed"], report["failed"]) == (20, 0)
    assert behaviour.num_connections > 5


def test_events_are_counted_where_there_is_no_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(sends_usage=False)) as url:
        text, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "5")
    assert report["total_output_tokens"] == 20
    assert "5 answers had no usage" in text
    assert "5 answers had no usage" in report["notes"][0]


def test_tokens_that_come_together_are_all_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(tokens_per_event=2, between=0.02)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "2")
    assert report["total_output_tokens"] == 8
    assert report["median_itl_ms"] == pytest.approx(20, rel=0.3)
    assert report["median_tpot_ms"] == pytest.approx(20 / 3, rel=0.3)


@pytest.mark.parametrize(("tokens_per_word", "words"), [(1, 40), (2, 20)])
def test_words_are_calibrated_where_ids_are_refused(
    tokens_per_word: int, words: int, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour(takes_token_ids=False, tokens_per_word=tokens_per_word, extra_prompt_tokens=7)
    with fake_server(behaviour) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--input-len", "40", "--num-prompts", "2")
    assert {len(body["prompt"].split()) for body in behaviour.bodies} == {words}
    assert report["total_input_tokens"] == 2 * 47
    assert "words" in report["prompts"]


def test_a_chat_of_several_turns_continues_with_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = Behaviour()
    chats = ["--dataset-name", "multi_turn", "--turns", "3", "--num-prompts", "2", "--max-concurrency", "1"]
    with fake_server(behaviour) as url:
        _, report = bench(capsys, "serve", url, *SMALL, *chats, "--think-time", "0.01")
    assert report["completed"] == 6
    assert report["backend"] == "openai-chat"
    first, second, third = (body["messages"] for body in behaviour.bodies[1:4])  # the first of all is the check
    assert second[:2] == [*first, {"role": "assistant", "content": " w0 w1 w2 w3"}]
    assert third[: len(second)] == second
    assert [message["role"] for message in third] == ["user", "assistant"] * 2 + ["user"]
    assert len(behaviour.bodies[4]["messages"]) == 1


def test_lines_of_a_file_follow_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"p{index}", "output_len": index + 2}) for index in range(3)))
    behaviour = Behaviour()
    load = ["--num-prompts", "4", "--repeats", "2", "--max-concurrency", "1"]
    with fake_server(behaviour) as url:
        _, report = bench(capsys, "serve", url, "--dataset-path", str(file), "--disable-tqdm", *load)
    asked = [(body["prompt"], body["max_tokens"]) for body in behaviour.bodies[1:]]
    assert asked == [(f"p{index % 3}", index % 3 + 2) for index in range(8)]
    assert "ignore_eos" not in behaviour.bodies[1]
    assert report["total_output_tokens"] == sum(length for _, length in asked)


def test_fields_headers_and_probes_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = Behaviour(first=0.05)
    body = ["--extra-body", '{"top_k": 3, "stream_options": null}', "--temperature", "0", "--no-ignore-eos"]
    head = ["--header", "X-A=b", "--api-key", "secret", "--metadata", "tp=2", "--probe-request-rate", "50"]
    with fake_server(behaviour) as url:
        text, report = bench(capsys, "serve", url + "/v1/", *SMALL, "--num-prompts", "3", *body, *head)
    sent = behaviour.bodies[-1]
    assert (sent["top_k"], sent["temperature"]) == (3, 0)
    assert not {"stream_options", "ignore_eos"} & set(sent)
    assert {"X-A: b", "Authorization: Bearer secret"} <= set(behaviour.heads[-1].split("\r\n"))
    assert report["tp"] == "2"
    assert report["probe_completed"] >= 1
    assert "secret" not in text + json.dumps(report)


def test_warm_ups_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = Behaviour()
    with fake_server(behaviour) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "3", "--num-warmups", "5")
    assert len(behaviour.bodies) == 1 + 5 + 3
    assert report["completed"] == 3
    assert len({str(body["prompt"]) for body in behaviour.bodies}) == 9


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


def test_ratios_of_two_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow, fast = Behaviour(first=0.04, between=0.02), Behaviour(first=0.02, between=0.01)
    load = ["--num-prompts", "4", "--max-concurrency", "2", "--html", str(tmp_path / "a.html")]
    with fake_server(slow) as url, fake_server(fast) as other:
        text, report = bench(capsys, "serve", url, "--compare", other, *SMALL, *load)
    ratios = report["ratios"]
    for name in ("median_ttft_ms", "median_itl_ms", "median_e2el_ms"):
        low, high = ratios[name]["confidence_95"]
        assert low <= ratios[name]["ratio"] <= high
        assert 0.4 < ratios[name]["ratio"] < 0.75
    assert ratios["output_throughput"]["ratio"] == pytest.approx(1 / ratios["mean_e2el_ms"]["ratio"], rel=0.1)
    assert [server["completed"] for server in report["servers"]] == [12, 12]
    assert "B / A" in text
    [sizes, others] = [[len(body["prompt"]) for body in each.bodies] for each in (slow, fast)]
    assert sizes == others
    assert not {str(body["prompt"]) for body in slow.bodies} & {str(body["prompt"]) for body in fast.bodies}


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


def test_a_sweep_without_a_rate_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--goodput", "ttft:1", "--duration", "0.02", "--start-rate", "100"]
    with fake_server(Behaviour(first=0.02)) as url:
        text, report = bench(capsys, "sweep", url, *SMALL, *limits, code=1)
    assert report["highest_rate"] is None
    assert "No rate kept" in text
    assert "even one request at a time" in report["ended_early"]
    assert any("ended early" in note for run in report["runs"] for note in run["notes"])


def test_a_client_that_was_late_prints_no_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer costs this client 20 ms, at 100 requests per second."""

    def on_answer(answer: object) -> bool:
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass
        return False

    real = trial.Bench.run

    async def slow_run(self: trial.Bench, rate: float, name: object, **options: Any) -> Any:
        return await real(self, rate, name, **{**options, "stop": on_answer})

    monkeypatch.setattr(trial.Bench, "run", slow_run)
    monkeypatch.setattr(trial, "wrong_figures", measure.wrong_figures)
    load = ["--request-rate", "100", "--num-prompts", "60"]
    with fake_server(Behaviour(first=0.01)) as url:
        text, report = bench(capsys, "serve", url, *SMALL, *load, code=1)
    assert report["client"]["bottleneck"]
    assert report["mean_ttft_ms"] is report["p99_e2el_ms"] is report["request_throughput"] is None
    assert "THE CLIENT WAS THE BOTTLENECK" in text
    assert "Mean TTFT (ms):                          not valid" in text
    assert report["completed"] == 60


def test_ctrl_c_prints_what_was_measured() -> None:
    command = [sys.executable, "-m", "server.cli", "bench", "serve"]
    with fake_server(Behaviour(first=0.02)) as url:
        load = ["--request-rate", "20", "--num-prompts", "10000", *SMALL]
        process = subprocess.Popen(
            [*command, url, *load],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in the background
        )
        assert process.stdout is not None
        process.stdout.readline()  # the load begins
        time.sleep(1)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    report = json.loads(out.splitlines()[-1])
    assert 5 <= report["completed"] <= 60
    assert report["interrupted"]
    assert "interrupted: requests that were under way are left out" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve"], ["URL"]),
        (["serve", "localhost:8000"], ["http://localhost:8000"]),
        (["serve", "http://127.0.0.1:9"], ["no server answers", "--ready-check-timeout-sec"]),
        (["serve", "URL", "--request-rate", "0"], ["--request-rate"]),
        (["serve", "URL", "--burstiness", "-1"], ["--burstiness"]),
        (["serve", "URL", "--goodput", "itl:3"], ["--goodput", "ttft"]),
        (["serve", "URL", "--requestrate", "1"], ["did you mean --request-rate?"]),
        (["serve", "URL", "--extra-body", "[]"], ["--extra-body"]),
        (["serve", "URL", "--dataset-name", "custom"], ["--dataset-path"]),
        (["serve", "URL", "--dataset-path", "/nowhere"], ["--dataset-path /nowhere"]),
        (["serve", "URL", "--turns", "2"], ["multi_turn"]),
        (["serve", "URL", "--dataset-name", "multi_turn", "--endpoint", "/v1/completions"], ["/v1/chat/completions"]),
        (["serve", "URL", "--ramp-up-strategy", "linear"], ["--ramp-up-start-rps"]),
        (["serve", "URL", "--ramp-up-strategy", "linear", "--request-rate", "2"], ["--request-rate"]),
        (["serve", "URL", "--compare", "URL", "--request-rate", "2,3"], ["--compare"]),
        (["sweep", "URL"], ["--goodput"]),
        (["sweep", "URL", "--goodput", "ttft:3", "--attainment", "2"], ["--attainment"]),
    ],
)
def test_refusals_are_one_line(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_what_the_server_refuses_is_said_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(fail=lambda number: "refuse")) as url:
        assert cli.main(["bench", "serve", url, *SMALL]) == 2
    assert "does not answer a first request: HTTP 503: too busy" in capsys.readouterr().err


def test_a_server_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    assert cli.main(["bench", "serve", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0.6"]) == 2
    assert time.perf_counter() - began > 0.6
    assert "no server answers" in capsys.readouterr().err


def test_the_thresholds_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    for value in (f"{saturation.MAX_CPU_SHARE:.0%}", f"{saturation.MAX_SHARE_OF_FIGURE:.0%}", "2 ms"):
        assert value.replace("%", " %") in text
    assert serve.NOT_VALID == 1


def answering(raw: bytes, models: bytes = b"") -> Behaviour:
    """A server that gives these bytes for a completion, and then ends the connection."""
    return Behaviour(raw_answer=raw, raw_models=models)


OK = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'


def test_an_answer_may_end_with_its_connection(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(answering(OK + EVENT + EVENT)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "3", "--max-concurrency", "1")
    assert (report["completed"], report["total_output_tokens"]) == (3, 6)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"SSH-2.0\r\n\r\n", "not HTTP"),
        (OK.replace(b"text", b"x\r\nContent-Length: 999\r\nX: text") + EVENT, "before the end of its answer"),
        (OK + b"<p>hello</p>", "no choices"),
        (b"", "closed the connection"),
    ],
)
def test_odd_servers_are_told_apart_before_the_run(raw: bytes, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(answering(raw)) as url:
        assert cli.main(["bench", "serve", url, *SMALL]) == 2
    captured = capsys.readouterr()
    assert word in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("models", "word"),
    [
        (b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n", "--model"),
        (b'HTTP/1.1 200 X\r\nContent-Length: 12\r\n\r\n{"data": []}', "lists no model"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 5\r\n\r\n<p>x<", "not JSON"),
    ],
)
def test_a_server_need_not_list_its_models(models: bytes, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(raw_models=models)) as url:
        assert cli.main(["bench", "serve", url, *SMALL]) == 2
        assert word in capsys.readouterr().err
    if b"404" in models:
        with fake_server(Behaviour(raw_models=models)) as url:
            _, report = bench(capsys, "serve", url, *SMALL, "--model", "mine", "--num-prompts", "1")
        assert report["model_id"] == "mine"


def interrupt_run(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ctrl-C ended the run of this number, counted from 0."""
    real, runs = trial.Bench.run, iter(range(100))

    async def run(self: trial.Bench, *names: Any, **options: Any) -> Any:
        done = await real(self, *names, **options)
        done.interrupted = next(runs) == number
        return done

    monkeypatch.setattr(trial.Bench, "run", run)


@pytest.mark.parametrize(("number", "pairs"), [(1, 1), (2, 1), (3, 1), (5, 2)])
def test_an_interrupted_comparison_prints_its_whole_pairs(
    number: int, pairs: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_run(number, monkeypatch)
    with fake_server(Behaviour()) as url:
        _, report = bench(capsys, "serve", url, "--compare", url, *SMALL, "--num-prompts", "2", code=130)
    assert [server["completed"] for server in report["servers"]] == [2 * pairs] * 2


def test_a_comparison_interrupted_at_once_prints_its_half(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_run(0, monkeypatch)
    with fake_server(Behaviour()) as url:
        argv = ["serve", url, "--compare", url, *SMALL, "--num-prompts", "2"]
        assert cli.main(["bench", *argv]) == 130
    text = capsys.readouterr().out
    assert text.startswith("A:\n")
    assert "B:" not in text


def test_an_interrupted_sweep_and_an_interrupted_repeat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_run(1, monkeypatch)
    options = ["--goodput", "ttft:1000", "--duration", "0.1", "--start-rate", "200"]
    with fake_server(Behaviour()) as url:
        text, report = bench(capsys, "sweep", url, *SMALL, *options, code=130)
    assert (report["highest_rate"], report["ended_early"], len(report["runs"])) == (200, "interrupted", 2)
    assert "the search ended early: interrupted" in text

    interrupt_run(2, monkeypatch)
    with fake_server(Behaviour()) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "2", "--repeats", "4", code=130)
    assert report["completed"] == 4
    assert report["interrupted"]


def test_a_sweep_that_the_client_spoils_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep.Sweep, "_why_wrong", SPOILT)
    monkeypatch.setattr(saturation, "MAX_SHARE_OF_FIGURE", -1.0)
    monkeypatch.setattr(saturation, "CLOCK_STEP", -1.0)
    with fake_server(Behaviour()) as url:
        _, report = bench(capsys, "sweep", url, *SMALL, "--goodput", "e2el:900", "--duration", "0.01", code=1)
    assert report["highest_rate"] is None
    assert "the client was" in report["ended_early"]
