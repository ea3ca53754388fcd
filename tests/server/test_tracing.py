"""Spans of requests, as OpenTelemetry's own exporter in memory gets them."""

import builtins
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from configs.errors import UsageError
from configs.settings import ServerConfig
from server.app import create_app
from server.metrics import tracing
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    memory = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda endpoint: memory)
    monkeypatch.setattr(tracing, "BatchSpanProcessor", SimpleSpanProcessor)
    return memory


@pytest.fixture
def traced(engine: FakeEngine, exporter: InMemorySpanExporter) -> FastAPI:
    return create_app(engine, ServerConfig(otlp_traces_endpoint="http://collector/v1/traces"), MODEL)


@pytest.fixture
async def tracing_client(traced: FastAPI) -> Any:
    transport = httpx.ASGITransport(traced, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_a_request_is_a_span_below_the_clients_own(
    tracing_client: httpx.AsyncClient, engine: FakeEngine, exporter: InMemorySpanExporter
) -> None:
    engine.delay, engine.num_cached_tokens = 0.002, 3
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    body = {"prompt": "abc", "n": 2, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9}
    answer = await tracing_client.post("/v1/completions", json=body, headers=headers)
    [span] = exporter.get_finished_spans()
    assert (span.name, span.kind, span.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    attributes = dict(span.attributes or {})
    latencies = {name: attributes.pop(name) for name in sorted(attributes) if name.startswith("gen_ai.latency")}
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.id": "mine",
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.prompt_tokens": 4,
        "gen_ai.usage.cached_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.num_sequences": 2,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    check_times(span, latencies)


def check_times(span: ReadableSpan, latencies: dict[str, Any]) -> None:
    assert [event.name for event in span.events] == ["queued", "admitted", "first_token", "finished"]
    moments = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert moments == sorted(moments)
    assert span.end_time - span.start_time == pytest.approx(latencies["gen_ai.latency.e2e"] * 1e9, abs=2000)
    short = {name.removeprefix("gen_ai.latency."): seconds for name, seconds in latencies.items()}
    parts = short["time_in_model_prefill"] + short["time_in_model_decode"]
    assert short["time_in_model_inference"] == pytest.approx(parts)
    assert 0 <= short["time_in_queue"] < short["time_to_first_token"] < short["e2e"]


async def test_without_a_parent_a_trace_begins(
    tracing_client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    for headers in ({}, {"traceparent": "nonsense"}):
        await tracing_client.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"], headers=headers)
    assert [span.parent for span in exporter.get_finished_spans()] == [None, None]
    assert {span.attributes["gen_ai.operation.name"] for span in exporter.get_finished_spans() if span.attributes} == {
        "chat"
    }


async def test_what_the_client_does_not_trace_is_not_traced(
    tracing_client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    await tracing_client.post(
        "/v1/completions", json={"prompt": "x"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}
    )
    assert exporter.get_finished_spans() == ()


async def test_refusals_and_failures_are_spans_that_say_so(
    tracing_client: httpx.AsyncClient, engine: FakeEngine, exporter: InMemorySpanExporter
) -> None:
    await tracing_client.post("/v1/completions", json={"prompt": "x", "n": -1})
    engine.fail_after = (1, RuntimeError("SECRET"))
    await tracing_client.post("/v1/completions", json={"prompt": "SECRET"})
    await tracing_client.post("/v1/completions", json={"prompt": "SECRET", "stream": True})
    refused, failed, broken = exporter.get_finished_spans()
    assert (refused.status.status_code, dict(refused.attributes or {})["error.type"]) == (
        StatusCode.UNSET,
        "invalid_request_error",
    )
    assert (failed.status.status_code, broken.status.status_code) == (StatusCode.ERROR, StatusCode.ERROR)
    assert [event.name for event in broken.events][-1] == "aborted"
    assert "SECRET" not in "".join(span.to_json() for span in (refused, failed, broken))
    await tracing_client.get("/health")
    assert len(exporter.get_finished_spans()) == 3


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = builtins.__import__

    def importing(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry.sdk"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "server.metrics.tracing")
    monkeypatch.setattr(builtins, "__import__", importing)
    yield
    monkeypatch.undo()
    sys.modules["server.metrics.tracing"] = tracing


def test_a_lack_of_packages_is_told_with_the_mend(without_packages: None, engine: FakeEngine) -> None:
    with pytest.raises(UsageError, match=r"pip install 'octavo\[otel\]'"):
        create_app(engine, ServerConfig(otlp_traces_endpoint="http://collector/v1/traces"), MODEL)


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    code = (
        "import sys, server.http_server; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
