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

        def nanoseconds(moment: float) -> int:
            return round((record.received_at + moment - record.received) * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(record.trace_context),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in _attributes(record, self._model).items() if value is not None},
            start_time=nanoseconds(record.received),
        )
        if (slowest := record.slowest()) is not None:
            end = "aborted" if slowest.finish_reason in FAILED else "finished"
            queued, first_token = slowest.timeline.queued, slowest.first_token
            moments = {"queued": queued, "admitted": slowest.admitted, "first_token": first_token, end: slowest.ended}
            for name, moment in moments.items():
                if moment is not None:
                    span.add_event(name, timestamp=nanoseconds(moment))
        if record.status >= 500 or any(choice.finish_reason == "error" for choice in record.choices):
            span.set_status(Status(StatusCode.ERROR, record.error or "the engine failed"))
        span.end(nanoseconds(record.ended))


def _attributes(record: RequestRecord, model: str) -> dict[str, Any]:
    """Tokens of all choices, times of the slowest; what is not known is None or missing."""
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
    slowest, ended = record.slowest(), record.ended
    if slowest is None or ended is None:
        return attributes
    _, queue, prefill, decode = slowest.phases(ended)
    tokens = record.token_counts()
    return attributes | {
        "gen_ai.request.temperature": slowest.temperature,
        "gen_ai.request.top_p": slowest.top_p,
        "gen_ai.request.max_tokens": slowest.max_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in record.choices],
        "gen_ai.usage.input_tokens": tokens["prompt_tokens"],
        "gen_ai.usage.output_tokens": tokens["output_tokens"],
        "gen_ai.usage.prompt_tokens": tokens["prompt_tokens"],
        "gen_ai.usage.completion_tokens": tokens["output_tokens"],
        "gen_ai.usage.cached_tokens": tokens["cached_tokens"],
        "gen_ai.usage.num_sequences": record.num_choices,
        "gen_ai.latency.e2e": ended - record.received,
        "gen_ai.latency.time_to_first_token": slowest.time_to_first_token,
        "gen_ai.latency.time_in_queue": queue,
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_in_model_inference": prefill + decode,
    }
