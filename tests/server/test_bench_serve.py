"""`octavo bench serve` against a server whose delays are known: the load, the prompts, and what servers answer."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from server.commands.bench.target import Response
from tests.server.bench_command import SMALL, bench, refusal, trust_client
from tests.server.fake_openai_server import Behaviour, fake_server

NAMES = {
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"),
    *("mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms"),
    *("date", "backend", "label", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
}


@pytest.fixture(autouse=True)
def _trusted_client(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_client(monkeypatch)


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
        text, report = bench(
            capsys, "serve", url + "/v1/", *SMALL, "--num-prompts", "3", "--max-concurrency", "1", *body, *head
        )
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


OK = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'


def test_an_answer_may_end_with_its_connection(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(raw_answer=OK + EVENT + EVENT)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "3", "--max-concurrency", "1")
    assert (report["completed"], report["total_output_tokens"]) == (3, 6)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve"], ["URL"]),
        (["serve", "localhost:8000"], ["http://localhost:8000"]),
        (["serve", "http://a:b"], ["not a URL"]),
        (["serve", "http://a?b"], ["not a URL"]),
        (["serve", "http://u:p@a"], ["--header"]),
        (["serve", "http://127.0.0.1:9"], ["no server answers", "--ready-check-timeout-sec"]),
        (["serve", "http://a", "--request-rate", "0"], ["--request-rate"]),
        (["serve", "http://a", "--request-rate", "1,"], ["--request-rate", "''"]),
        (["serve", "http://a", "--burstiness", "-1"], ["--burstiness"]),
        (["serve", "http://a", "--num-warmups", "²"], ["--num-warmups", "at least 0"]),
        (["serve", "http://a", "--goodput", "itl:3"], ["--goodput", "ttft"]),
        (["serve", "http://a", "--goodput", "ttft:inf"], ["--goodput", "number"]),
        (["serve", "http://a", "--goodput"], ["--goodput"]),
        (["serve", "http://a", "--header", "a=b\r\nc: d"], ["--header"]),
        (["serve", "http://a", "--metadata", "a"], ["--metadata", "KEY=VALUE"]),
        (["serve", "http://a", "--percentile-metrics", "ttft,x"], ["--percentile-metrics", "'x'"]),
        (["serve", "http://a", "--metric-percentiles", "101"], ["--metric-percentiles", "at most 100"]),
        (["serve", "http://a", "--random-range-ratio", "nan"], ["--random-range-ratio"]),
        (["serve", "http://a", "--requestrate", "1"], ["did you mean --request-rate?"]),
        (["serve", "http://a", "--extra-body", "[]"], ["--extra-body"]),
        (["serve", "http://a", "--dataset-name", "custom"], ["--dataset-path"]),
        (["serve", "http://a", "--dataset-path", "/nowhere"], ["--dataset-path /nowhere"]),
        (["serve", "http://a", "--turns", "2"], ["multi_turn"]),
        (["serve", "http://a", "--dataset-name", "multi_turn", "--endpoint", "/v1/completions"], ["/v1/chat/comp"]),
        (["serve", "http://a", "--ramp-up-strategy", "linear"], ["--ramp-up-start-rps"]),
        (["serve", "http://a", "--ramp-up-strategy", "linear", "--request-rate", "2"], ["--request-rate"]),
        (["serve", "http://a", "--compare", "http://a", "--request-rate", "2,3"], ["--compare"]),
        (["sweep", "http://a"], ["--goodput"]),
        (["sweep", "http://a", "--goodput", "ttft:3", "--attainment", "2"], ["--attainment"]),
    ],
)
def test_refusals_are_one_line(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, *argv)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no prompts"),
        ("x", "line 1"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2"),
        ('{"output_len": 3}', "exactly one"),
        ('{"prompt": ""}', "exactly one"),
        ('{"prompt": "a", "turns": ["b"]}', "exactly one"),
        ('{"prompt": "a", "output_len": 0}', "at least 1"),
        ('{"prompt": [1]}\n{"messages": [{"role": "user", "content": "c"}]}', "token ids"),
    ],
)
def test_bad_files_are_refused_by_line(
    text: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    assert word in refusal(capsys, "serve", "http://a", "--dataset-path", str(file))


def test_what_the_server_refuses_is_said_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(fail=lambda number: "refuse")) as url:
        assert "does not answer a first request: HTTP 503: too busy" in refusal(capsys, "serve", url, *SMALL)


def test_a_server_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    assert "no server answers" in refusal(capsys, "serve", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0.6")
    assert time.perf_counter() - began > 0.6


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"SSH-2.0\r\n\r\n", "not HTTP"),
        (OK.replace(b"text", b"x\r\nContent-Length: 999\r\nX: text") + EVENT, "before the end of its answer"),
        (OK + b"<p>hello</p>", "no choices"),
        (OK + b'{"choices": [{"text": "whole"}]}', "no choices"),
        (OK + b"data: nonsense\n\n", "not an event"),
        (OK + b'data: {"choices": 3}\n\n', "not an event"),
        (b'HTTP/1.0 500 X\r\n\r\n{"detail": "a\\n b"}', "HTTP 500: a b"),
        (b"HTTP/1.0 500 X\r\n\r\n<p>d</p>", "HTTP 500: <p>d</p>"),
        (b"", "closed the connection"),
    ],
)
def test_odd_servers_are_told_apart_before_the_run(raw: bytes, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(raw_answer=raw)) as url:
        assert word in refusal(capsys, "serve", url, *SMALL)


@pytest.mark.parametrize(
    ("models", "word"),
    [
        (b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n", "--model"),
        (b'HTTP/1.1 200 X\r\nContent-Length: 12\r\n\r\n{"data": []}', "lists no model"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 5\r\n\r\n<p>x<", "malformed"),
    ],
)
def test_a_server_need_not_list_its_models(models: bytes, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(Behaviour(raw_models=models)) as url:
        assert word in refusal(capsys, "serve", url, *SMALL)
    if b"404" in models:
        with fake_server(Behaviour(raw_models=models)) as url:
            _, report = bench(capsys, "serve", url, *SMALL, "--model", "mine", "--num-prompts", "1")
        assert report["model_id"] == "mine"


def test_neither_a_role_nor_a_reason_is_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"role": "assistant", "content": "a"},
        {"tool_calls": [{"index": 0}]},
        {"content": ""},
    ]
    choices = [{"delta": delta} for delta in deltas] + [{"delta": {}, "finish_reason": "stop"}]
    raw = OK + b"".join(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices)
    load = ["--endpoint", "/v1/chat/completions", "--num-prompts", "1"]
    with fake_server(Behaviour(raw_answer=raw)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, *load)
    assert report["total_output_tokens"] == 4


def test_an_answer_of_one_token_without_text_has_a_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    raw = OK + b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
    with fake_server(Behaviour(raw_answer=raw)) as url:
        _, report = bench(capsys, "serve", url, *SMALL, "--num-prompts", "1")
    assert (report["total_output_tokens"], report["mean_tpot_ms"]) == (1, None)
    assert report["mean_ttft_ms"] > 0


STREAM = (
    b'data: {"choices": [{"text": "a"}]}\r\n\r\n'
    b": a comment\n\n"
    b'event: x\ndata:{"choices": [{"text": "", "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": '
    b'{"cached_tokens": 4}}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    response = Response(0.0)
    for begin in range(0, len(STREAM), size):
        response.receive(STREAM[begin : begin + size], 1.0)
    response.finish()
    assert response.token_times == [1.0, 1.0]
    assert (response.prompt_tokens, response.cached_tokens, response.output_tokens) == (7, 4, 2)
    assert response.text == "a"


def prompts_of(capsys: pytest.CaptureFixture[str], *argv: str) -> list[tuple[list[int], int]]:
    """The token ids and lengths that are asked for, without those of the first request."""
    behaviour = Behaviour()
    with fake_server(behaviour) as url:
        bench(capsys, "serve", url, "--disable-tqdm", "--max-concurrency", "1", *argv)
    return [(body["prompt"], body["max_tokens"]) for body in behaviour.bodies[1:]]


def test_random_lengths_fill_their_range_by_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-prompts", "60", "--input-len", "10", "--output-len", "5", "--random-range-ratio", "0.3"]
    asked = prompts_of(capsys, *sizes, "--seed", "7")
    assert {len(prompt) for prompt, _ in asked} == set(range(7, 14))
    assert {output_len for _, output_len in asked} == set(range(3, 8))
    assert asked == prompts_of(capsys, *sizes, "--seed", "7") != prompts_of(capsys, *sizes, "--seed", "8")


def test_a_random_prefix_is_shared_by_all_and_comes_on_top(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--input-len", "10-12", "--output-len", "2-3"]
    prompts = [tuple(ids) for ids, _ in prompts_of(capsys, *sizes, "--num-prompts", "20", "--random-prefix-len", "6")]
    assert {prompt[:6] for prompt in prompts} == {prompts[0][:6]}
    assert {len(prompt) for prompt in prompts} == {16, 17, 18}
    assert len({prompt[6:] for prompt in prompts}) == 20


def test_shared_prefixes_begin_equal_numbers_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("prefix-len", "suffix-len", "num-prefixes")
    sizes = [part for name, n in zip(names, "834", strict=True) for part in (f"--prefix-repetition-{name}", n)]
    load = ["--dataset-name", "prefix_repetition", "--num-prompts", "40", "--output-len", "2"]
    asked = prompts_of(capsys, *load, *sizes)
    prefixes = [tuple(prompt[:8]) for prompt, _ in asked]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [10] * 4
    assert len({tuple(prompt) for prompt, _ in asked}) == 40
    assert {len(prompt) for prompt, _ in asked} == {11}
    assert prefixes[:10] != [prefixes[0]] * 10
