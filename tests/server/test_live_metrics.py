"""Metrics, timelines and logs of a real server, whose cache is too small and whose engine is killed once."""

import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import httpx
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.test_live_server import LiveServer, live_server

NUM_REQUESTS, PROMPT, NUM_TOKENS = 8, "One day, a fox who lived in the forest of", 48


class Collected(BaseHTTPRequestHandler):
    """What an OpenTelemetry collector would get."""

    spans: ClassVar[list[str]] = []
    """Their request ids."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in resource.scope_spans[0].spans:
                self.spans += [one.value.string_value for one in span.attributes if one.key == "gen_ai.request.id"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Collected) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: HTTPServer) -> Iterator[LiveServer]:
    flags = ["--log-format", "json", "--kv-cache-tokens", "208", "--memory-bandwidth", "50"]
    flags += ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces"]
    with live_server(tmp_path_factory.mktemp("metrics") / "log", *flags) as running:
        running.wait_ready()
        yield running


def scraped(server: LiveServer) -> dict[str, float]:
    """Values by name; those of one name with several labels together."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=30).text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def complete(server: LiveServer, number: int) -> httpx.Response:
    fields: dict[str, Any] = {
        "prompt": f"{PROMPT} {number}",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    fields |= {"stop": ["zzz"], "stream": False}
    return httpx.post(f"{server.url}/v1/completions", json=fields, headers={"x-request-id": f"r{number}"}, timeout=120)


def timeline(server: LiveServer, name: str) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/v1/requests/{name}", timeout=30).json())


def settled(server: LiveServer) -> dict[str, float]:
    """When nothing runs any more, as it must be soon."""
    end = time.monotonic() + 10
    while (values := scraped(server))["vllm:num_requests_running"] or values["octavo:http_requests_running"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    return values


def test_numbers_agree_with_each_other_and_with_the_answers(server: LiveServer) -> None:
    before = scraped(server)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda number: complete(server, number), range(NUM_REQUESTS)))
    after = settled(server)
    more = {name: value - before[name] for name, value in after.items() if name in before}
    assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS
    usages = [answer.json()["usage"] for answer in answers]
    assert more["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert more["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert more["vllm:request_success_total"] == more["vllm:e2e_request_latency_seconds_count"] == NUM_REQUESTS
    assert more["vllm:inter_token_latency_seconds_count"] == NUM_REQUESTS * (NUM_TOKENS - 1)
    assert more["octavo:step_seconds_count"] > NUM_TOKENS
    computed = sum(usage["prompt_tokens"] for usage in usages) + NUM_REQUESTS * (NUM_TOKENS - 1)
    computed -= sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert more["vllm:iteration_tokens_total_sum"] == computed + more["octavo:recomputed_tokens_total"]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"vllm:{name}"] == 0
    assert after["octavo:memory_bandwidth_fraction"] == 0
    timelines = [timeline(server, f"r{number}") for number in range(NUM_REQUESTS)]
    choices = [choice for told in timelines for choice in told["choices"]]
    assert sum(choice["num_preemptions"] for choice in choices) == more["vllm:num_preemptions_total"] > 0
    assert sum(choice["num_recomputed_tokens"] for choice in choices) == more["octavo:recomputed_tokens_total"] > 0
    said = [sentence for told in timelines for sentence in told["why"]]
    assert any("preempted" in sentence for sentence in said)
    assert any("--kv-cache-tokens" in sentence for sentence in said)


def check_sums(server: LiveServer, num_aborted: int) -> None:
    """Counters and histograms of tokens agree; histograms hold choices that were aborted or not."""
    end = time.monotonic() + 10
    while True:
        families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=30).text)
        [success] = [family for family in families if family.name == "vllm:request_success"]
        of_each = {sample.labels["finished_reason"]: sample.value for sample in success.samples}
        if of_each["abort"] >= num_aborted:
            break
        assert time.monotonic() < end
        time.sleep(0.05)
    values = settled(server)
    for kind in ("prompt", "generation"):
        assert values[f"vllm:{kind}_tokens_total"] == values[f"vllm:request_{kind}_tokens_sum"]
    assert values["vllm:request_prompt_tokens_count"] == sum(of_each.values())
    assert values["vllm:e2e_request_latency_seconds_count"] == sum(of_each.values()) - of_each["abort"]


def test_tokens_of_clients_that_leave_are_counted_in_counters_and_histograms_alike(server: LiveServer) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stream": True}
    for index, (more, num_lines) in enumerate(
        [({}, 2), ({"stream_interval": 50}, 2), ({}, 20), ({"stream_interval": 9}, 6)]
    ):
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**fields, **more}, timeout=60) as answer:
            lines = answer.iter_lines()
            assert all(next(lines) is not None for _ in range(num_lines))
            time.sleep(0.3)
        check_sums(server, index + 1)


def test_a_stop_string_ends_a_timeline_as_the_engine_would_have(server: LiveServer) -> None:
    text = complete(server, 1).json()["choices"][0]["text"]
    fields = {"prompt": f"{PROMPT} 1", "max_tokens": NUM_TOKENS, "temperature": 0, "stop": [text[40:44]]}
    httpx.post(f"{server.url}/v1/completions", json=fields, headers={"x-request-id": "stopped"}, timeout=60)
    [choice] = timeline(server, "stopped")["choices"]
    assert choice["finish_reason"] == "stop"
    assert 3 < choice["num_output_tokens"] <= choice["num_decode_steps"] + 1
    assert choice["mean_step_requests"] == 1.0


def test_all_that_is_logged_is_json_and_tells_each_request(server: LiveServer) -> None:
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    requests = {line["request_id"]: line for line in lines if line["logger"] == "octavo.requests"}
    assert {f"r{number}" for number in range(NUM_REQUESTS)} <= requests.keys()
    assert requests["r3"]["output_tokens"] == NUM_TOKENS
    assert any("Serving on http" in line["message"] for line in lines)
    assert PROMPT not in server.log.read_text()


def test_counters_outlive_the_engine_and_gauges_do_not(server: LiveServer) -> None:
    before = settled(server)
    [engine] = server.children()
    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(complete, server, 50 + number) for number in range(2)]
        while scraped(server)["vllm:num_requests_running"] == 0:
            time.sleep(0.02)
        os.kill(engine.pid, signal.SIGKILL)
        statuses = [one.result().status_code for one in work]
        assert set(statuses) <= {200, 503}
        between = scraped(server)
        server.wait_ready()
        assert complete(server, 60).status_code == 200
    after = settled(server)
    for earlier, later in ((before, between), (between, after)):
        for name, value in earlier.items():
            if name.endswith(("_total", "_sum", "_count")) and not name.startswith("octavo_engine_process"):
                assert later[name] >= value, name
    assert after["octavo:engine_restarts_total"] == before["octavo:engine_restarts_total"] + 1
    assert after["octavo:engine_up"] == 1
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert not psutil.pid_exists(engine.pid) or server.children()[0].pid != engine.pid
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert any("the engine has stopped" in line["message"] for line in lines)


def test_every_request_is_traced_before_the_server_ends(server: LiveServer) -> None:
    complete(server, 70)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert {"r0", "r7", "stopped", "r70"} <= set(Collected.spans)
    assert len(Collected.spans) == len(set(Collected.spans)) + 1, "r1 was sent twice"
