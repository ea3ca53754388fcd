"""A trace of each request for an OpenTelemetry collector. Imported only where one is named.

Attributes have the names of OpenTelemetry's conventions for generative AI, and beside them those that vLLM gives,
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from typing import Any

from configs.errors import UsageError
from server import version
from server.metrics.records import FAILED, RequestRecord

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise UsageError("--otlp-traces-endpoint needs more packages: pip install 'octavo[otel]'") from error

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
}


class RequestTracer:
    """Sends the trace of each request that has ended, in a thread of its own and in batches; the rest is sent when the
    process ends."""

    def __init__(self, endpoint: str, model: str) -> None:
        resource = Resource.create({"service.name": "octavo", "service.version": version()})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = provider.get_tracer("octavo")
        self._model = model

    def __call__(self, record: RequestRecord) -> None:
        """One span, below the client's where it names one; what happened meanwhile are its events."""
        assert record.ended is not None
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(record.trace_context),
            kind=SpanKind.SERVER,
            attributes={**_of_request(record, self._model), **_of_choices(record, record.ended)},
            start_time=_nanoseconds(record, record.received),
        )
        if (slowest := record.slowest()) is not None:
            end = "aborted" if slowest.finish_reason in FAILED else "finished"
            moments = {"queued": slowest.queued, "admitted": slowest.admitted, "first_token": slowest.first_token}
            for name, moment in {**moments, end: slowest.ended}.items():
                if moment is not None:
                    span.add_event(name, timestamp=_nanoseconds(record, moment))
        if record.status >= 500 or any(choice.finish_reason == "error" for choice in record.choices):
            span.set_status(Status(StatusCode.ERROR, record.error or "the engine failed"))
        span.end(_nanoseconds(record, record.ended))


def _of_request(record: RequestRecord, model: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS.get(record.route, "chat"),
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.n": record.n,
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.response.id": record.response_id,
        "error.type": record.error,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _of_choices(record: RequestRecord, ended: float) -> dict[str, Any]:
    """Tokens of all, times of the slowest."""
    slowest = record.slowest()
    if slowest is None:
        return {}
    phases = slowest.phases(ended)
    num_prompt, num_cached, num_output = record.token_counts()
    attributes: dict[str, Any] = {
        "gen_ai.request.temperature": slowest.temperature,
        "gen_ai.request.top_p": slowest.top_p,
        "gen_ai.request.max_tokens": slowest.max_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in record.choices],
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.cached_tokens": num_cached,
        "gen_ai.usage.num_sequences": record.num_choices,
        "gen_ai.latency.e2e": ended - record.received,
        "gen_ai.latency.time_to_first_token": slowest.first_token and slowest.first_token - record.received,
        "gen_ai.latency.time_in_queue": phases.queue,
        "gen_ai.latency.time_in_model_prefill": phases.prefill,
        "gen_ai.latency.time_in_model_decode": phases.decode,
        "gen_ai.latency.time_in_model_inference": phases.prefill + phases.decode,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(record: RequestRecord, moment: float) -> int:
    """Since 1970, of a moment on the monotonic clock."""
    return round((record.received_at + moment - record.received) * 1e9)
