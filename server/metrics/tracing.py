"""A trace of each request for an OpenTelemetry collector. Imported only where one is named.

Attributes have the names of OpenTelemetry's conventions for generative AI, and beside them those that vLLM gives,
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from collections.abc import Callable, Iterator
from typing import Any

from configs.errors import UsageError
from server.metrics.records import FAILED, Choice, RequestRecord
from server.version import version

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
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


def start_tracing(endpoint: str, model: str) -> Callable[[RequestRecord], None]:
    """What sends a request's trace, in a thread of its own and in batches; the rest is sent when the process ends."""
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
    return RequestTracer(processor, model)


class RequestTracer:
    """Called with each request when it is over."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        resource = Resource.create({"service.name": "octavo", "service.version": version()})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def __call__(self, record: RequestRecord) -> None:
        """One span, below the client's where it names one; what happened meanwhile are its events."""
        assert record.ended is not None
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(record.trace_context),
            kind=SpanKind.SERVER,
            attributes={**_of_request(record, self._model), **_of_choices(record, record.ended)},
            start_time=_nanoseconds(record, record.received),
        )
        for name, moment in _moments(record):
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
        "gen_ai.request.id": record.name,
        "gen_ai.request.n": record.n,
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
    }
    if record.response_id is not None:
        attributes["gen_ai.response.id"] = record.response_id
    if record.error is not None:
        attributes["error.type"] = record.error
    return attributes


def _of_choices(record: RequestRecord, ended: float) -> dict[str, Any]:
    """Tokens of all, times of the one that took longest."""
    slowest = record.slowest()
    if slowest is None:
        return {}
    choices, phases = record.choices, slowest.phases(ended)
    num_prompt = sum(choice.num_prompt_tokens for choice in choices[:: record.n])
    num_output = sum(choice.num_output_tokens for choice in choices)
    attributes: dict[str, Any] = {
        "gen_ai.request.temperature": slowest.temperature,
        "gen_ai.request.top_p": slowest.top_p,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in choices],
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.cached_tokens": sum(choice.num_cached_tokens for choice in choices[:: record.n]),
        "gen_ai.usage.num_sequences": record.num_choices,
        "gen_ai.latency.e2e": ended - record.received,
        "gen_ai.latency.time_in_queue": phases.queue,
        "gen_ai.latency.time_in_model_prefill": phases.prefill,
        "gen_ai.latency.time_in_model_decode": phases.decode,
        "gen_ai.latency.time_in_model_inference": phases.prefill + phases.decode,
    }
    if slowest.first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = slowest.first_token - record.received
    if slowest.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = slowest.max_tokens
    return attributes


def _moments(record: RequestRecord) -> Iterator[tuple[str, float]]:
    slowest: Choice | None = record.slowest()
    if slowest is None:
        return
    moments = {"queued": slowest.queued, "admitted": slowest.admitted, "first_token": slowest.first_token}
    moments["aborted" if slowest.finish_reason in FAILED else "finished"] = slowest.ended
    for name, moment in moments.items():
        if moment is not None:
            yield name, moment


def _nanoseconds(record: RequestRecord, moment: float) -> int:
    """Since 1970, of a moment on the monotonic clock."""
    return round((record.received_at + moment - record.received) * 1e9)
