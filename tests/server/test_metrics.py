"""GET /metrics: what is there, in which form, and that it tells the truth of the requests before it."""

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from configs.errors import EngineDead
from configs.settings import ServerConfig
from server.app import create_app
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES
from tests.server.test_reliability import serving_of

ROOT = Path(__file__).parents[2]
LABELS = {"model_name": MODEL, "engine": "0"}
VLLM = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
    "counter": "prompt_tokens generation_tokens request_success prefix_cache_queries prefix_cache_hits num_preemptions",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds"
    " e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds"
    " request_inference_time_seconds request_prompt_tokens request_generation_tokens"
    " request_max_num_generation_tokens request_params_n request_params_max_tokens iteration_tokens_total",
}
"""What dashboards and autoscalers ask for."""


async def scraped(client: httpx.AsyncClient) -> dict[str, Metric]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return {family.name: family for family in plain(answer.text)}


def samples(families: dict[str, Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in families.values():
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, "a series is there twice"
            found[key] = sample.value
    return found


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    return samples(families)[name, frozenset((LABELS | labels if name.startswith("vllm:") else labels).items())]


async def test_the_names_that_others_ask_for_are_there_from_the_start(client: httpx.AsyncClient) -> None:
    families = await scraped(client)
    for kind, names in VLLM.items():
        for name in names.split():
            family = families[f"vllm:{name}"]
            assert family.type == kind
            assert family.documentation
            assert {key: family.samples[0].labels[key] for key in LABELS} == LABELS
    for family in families.values():
        if family.type == "counter":
            assert all(sample.name == f"{family.name}_total" for sample in family.samples)
    reasons = {sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error", "repetition", "timeout"}


async def test_every_metric_is_documented_and_no_other(engine: FakeEngine) -> None:
    app = create_app(engine, ServerConfig(memory_bandwidth=1.0), MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.get("/health")
        families = await scraped(client)
    described = set()
    for name, family in families.items():
        if not re.match("(octavo_engine_)?process_", name):
            labels = [label for label in family.samples[0].labels if label not in {*LABELS, "le"}]
            shown = f"{name}_total" if family.type == "counter" else name
            described.add((shown, family.type, frozenset(labels), family.documentation))
    assert described == set(rows((ROOT / "docs" / "operations.md").read_text()))
    assert {"process_resident_memory_bytes", "octavo_engine_process_resident_memory_bytes"} <= families.keys()


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4,*/*;q=0.2",
    ],
)
async def test_who_likes_openmetrics_better_gets_it(client: httpx.AsyncClient, accept: str) -> None:
    """The second and third are what Prometheus 2 and 3 send."""
    await client.post("/v1/completions", json={"prompt": "hi"})
    answer = await client.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("\n# EOF\n")
    assert answer.text.count("# EOF") == 1
    strict = {family.name: family for family in openmetrics(answer.text)}
    other = await client.get("/metrics", headers={"accept": "*/*"})
    assert other.headers["content-type"].startswith("text/plain; version=")
    lenient = {family.name: family for family in plain(other.text)}
    assert strict.keys() == lenient.keys()
    name = "vllm:time_to_first_token_seconds"
    assert strict[name].samples == lenient[name].samples


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain; version=1.0.0; escaping=underscores",
        "application/openmetrics-text;q=0.3,text/plain;q=0.5",
        "application/openmetrics-text;q=0",
        "application/openmetrics-text;q=none,text/plain",
    ],
)
async def test_everybody_else_gets_text(client: httpx.AsyncClient, accept: str) -> None:
    answer = await client.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nvllm:num_requests_waiting{" in answer.text


async def test_a_head_has_no_body_and_nothing_is_kept_by_proxies(client: httpx.AsyncClient) -> None:
    answer = await client.head("/metrics")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert (await client.post("/metrics")).status_code == 405


async def test_many_may_ask_at_once_while_requests_run(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay = 0.001
    work = [client.post("/v1/completions", json={"prompt": "x" * 50}) for _ in range(5)]
    answers = await asyncio.gather(*(client.get("/metrics") for _ in range(20)), *work)
    for answer in answers[:20]:
        samples({family.name: family for family in plain(answer.text)})


async def test_numbers_are_those_of_the_requests(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20, "n": 3})  # BOS abc -> <abc> EOS
    await client.post("/v1/completions", json={"prompt": ["abcd", "abcd"], "max_tokens": 2})
    await client.post("/v1/embeddings", json={"input": "abcde"})
    families = await scraped(client)
    assert value(families, "vllm:prompt_tokens_total") == 3 * 4 + 2 * 5 + 6
    assert value(families, "vllm:generation_tokens_total") == 3 * 6 + 2 * 2
    assert value(families, "vllm:request_success_total", finished_reason="stop") == 3
    assert value(families, "vllm:request_success_total", finished_reason="length") == 3
    assert value(families, "vllm:request_params_n_sum") == 3 + 1 + 1 + 1
    assert value(families, "vllm:request_params_n_count") == 4
    assert value(families, "vllm:request_max_num_generation_tokens_sum") == 6 + 2 + 2 + 0
    assert value(families, "vllm:inter_token_latency_seconds_count") == 3 * 5 + 2 * 1
    assert value(families, "vllm:time_to_first_token_seconds_count") == 5
    assert value(families, "vllm:e2e_request_latency_seconds_count") == 6
    assert value(families, "octavo:http_requests_total", method="POST", route="/v1/completions", status="200") == 2


async def test_counters_never_fall_and_gauges_return_to_zero(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Under requests that end, fail, are refused and are left."""
    engine.script = lambda prompt, params: "a" * 60
    engine.delay = 0.001
    idle = await scraped(client)
    before = samples(idle)
    for number in range(6):
        engine.is_full = number == 3
        engine.fail_after = (5, RuntimeError("broken")) if number == 4 else None
        work = [
            asyncio.create_task(client.post(path, json=BODIES[path]))
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize")
        ]
        await asyncio.sleep(0.01)
        while not (number or engine.core.requests):
            await asyncio.sleep(0.001)
        if number == 5:
            work[0].cancel()
        families = await scraped(client)
        if number == 0:
            assert value(families, "vllm:num_requests_running") > 0
            assert value(families, "octavo:http_requests_running") > 0
            assert value(families, "vllm:kv_cache_usage_perc") > 0
        now = samples(families)
        for family in families.values():
            for sample in family.samples if family.type in ("counter", "histogram") else ():
                key = (sample.name, frozenset(sample.labels.items()))
                assert now[key] >= before.get(key, 0), key
        before = now
        await asyncio.gather(*work, return_exceptions=True)
    families = await scraped(client)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(families, f"vllm:{name}") == 0
    assert value(families, "octavo:http_requests_running") == 0
    assert value(families, "octavo:requests_refused_total", reason="queue_full") >= 3
    assert value(families, "vllm:request_success_total", finished_reason="error") >= 1


async def refusals(client: httpx.AsyncClient) -> dict[str, float]:
    return {
        one.labels["reason"]: one.value
        for one in (await scraped(client))["octavo:requests_refused"].samples
        if one.value
    }


async def test_requests_that_were_not_begun_count_by_their_reason(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    async def ask(status: int) -> None:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == status

    engine.end = EngineDead()
    await ask(503)
    assert await refusals(client) == {}, "it had begun"
    engine.is_full = True
    await ask(429)
    serving_of(client).drained_by = time.monotonic() + 9
    await ask(503)
    serving_of(client).drained_by, engine.is_dead = None, True
    await ask(503)
    assert await refusals(client) == {"queue_full": 1, "shutting_down": 1, "engine": 1}


async def test_why_somebody_waits_is_a_label(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.core.num_waiting = 4
    for cause, shown in (("blocks", "blocks"), ("seats", "seats"), ("tokens", "tokens"), (None, "other")):
        engine.core.wait_cause = cause
        waiting = (await scraped(client))["octavo:requests_waiting"].samples
        assert {sample.labels["cause"]: sample.value for sample in waiting if sample.value} == {shown: 4}
        assert len(waiting) == 4


async def test_names_of_clients_make_no_series(client: httpx.AsyncClient) -> None:
    """Whoever scans a server must not fill its memory, nor Prometheus's."""
    before = len(samples(await scraped(client)))
    for number in range(50):
        await client.request(f"M{number}", f"/nothing/{number}")
        await client.get(f"/v1/models/m{number}")
        await client.post("/v1/completions", json={"prompt": "x", "model": f"m{number}"})
        await client.get("/v1/models", headers={"x-request-id": f"r{number}"})
    found = samples(await scraped(client))
    assert len(found) - before <= 8
    assert not [key for key in found if "m7" in str(key) or "M7" in str(key) or "r7" in str(key)]


async def test_the_share_of_the_bandwidth_is_told_where_the_limit_is_known(engine: FakeEngine) -> None:
    """A gigabyte of weights in the fake's steps of 4 ms is 250 GB/s."""
    engine.info = msgspec.structs.replace(engine.info, weight_bytes=10**9)
    engine.script, engine.delay = lambda prompt, params: "a" * 900, 0.001
    app = create_app(engine, ServerConfig(memory_bandwidth=1000.0), MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        work = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 100}))
        while not engine.num_tokens:
            await asyncio.sleep(0.005)
        families = await scraped(client)
        [sample] = families["octavo:memory_bandwidth_fraction"].samples
        assert sample.value == pytest.approx(0.25)
        await work
        [sample] = (await scraped(client))["octavo:memory_bandwidth_fraction"].samples
        assert sample.value == 0


def promtool() -> str | None:
    return shutil.which("promtool") or shutil.which("promtool", path=ROOT / "build/prometheus/usr/bin")


@pytest.mark.skipif(promtool() is None, reason="promtool is not installed; `make test-monitoring` fetches it")
async def test_prometheus_own_tool_has_nothing_to_say_but_of_vllms_names(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "hi"})
    text = (await client.get("/metrics")).content
    checked = subprocess.run([str(promtool()), "check", "metrics"], input=text, capture_output=True, check=False)
    complaints = checked.stderr.decode().splitlines()
    known = (
        "metric names should not contain ':'",
        'vllm:iteration_tokens_total non-counter metrics should not have "_total"',
    )
    assert [line for line in complaints if not any(one in line for one in known)] == []
    assert complaints


def rows(document: str) -> Iterator[tuple[str, str, frozenset[str], str]]:
    """Name, kind, own labels and meaning of each metric in the documentation's table."""
    for line in document.splitlines():
        if found := re.match(r"\| `((?:vllm|octavo):\w+)`(?: by (.*?))? \| (\w+) \| (.*) \|", line):
            yield found[1], found[3], frozenset(re.findall(r"`(\w+)`", found[2] or "")), found[4]
