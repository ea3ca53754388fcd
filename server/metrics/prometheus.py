"""The metrics that Prometheus reads.

Names that begin with `vllm:` mean what they mean in vLLM, so that what was made for it fits.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from engine.messages import StepStats
from server.metrics.records import FAILED, ChoiceRecord, RequestRecord

HELP = {
    "vllm:num_requests_running": "Choices that are computed now.",
    "vllm:num_requests_waiting": "Choices that wait for their turn.",
    "vllm:kv_cache_usage_perc": "Share of the KV cache's blocks that choices hold; 1 is all of them.",
    "vllm:prefix_cache_queries": "Tokens that were looked for in the prefix cache.",
    "vllm:prefix_cache_hits": "Tokens that were found there, and so not computed.",
    "vllm:num_preemptions": "How often a running choice had to give its blocks to others.",
    "vllm:cache_config_info": "What the KV cache is like, in labels; always 1.",
    "vllm:prompt_tokens": "Tokens of prompts, cached ones too.",
    "vllm:generation_tokens": "Tokens that were generated.",
    "vllm:request_success": "Choices that have ended, by finish reason.",
    "vllm:request_prompt_tokens": "Tokens of a choice's prompt.",
    "vllm:request_generation_tokens": "Tokens of a choice's output.",
    "vllm:request_max_num_generation_tokens": "Tokens of the longest output among the choices of a prompt.",
    "vllm:request_params_n": "Choices that were asked for per prompt.",
    "vllm:request_params_max_tokens": "Most output tokens that were asked for, where they were.",
    "vllm:request_prefill_kv_computed_tokens": "Tokens of a choice's prompt that were not cached.",
    "vllm:request_num_preemptions": "How often a choice was preempted.",
    "vllm:time_to_first_token_seconds": "From the request's arrival to a choice's first token.",
    "vllm:inter_token_latency_seconds": "Between two tokens of a choice, each pair counted.",
    "vllm:request_time_per_output_token_seconds": "Between two tokens of a choice, the mean of each choice counted"
    " once.",
    "vllm:e2e_request_latency_seconds": "From the request's arrival to a choice's end.",
    "vllm:request_queue_time_seconds": "From the queue to the first step.",
    "vllm:request_prefill_time_seconds": "From the first step to the first token.",
    "vllm:request_decode_time_seconds": "From the first token to the last one.",
    "vllm:request_inference_time_seconds": "From the first step to the last token.",
    "vllm:iteration_tokens_total": "Tokens of a step.",
    "octavo:step_seconds": "How long a step takes.",
    "octavo:step_requests": "Choices in steps, each step's counted: over that of steps, the mean batch.",
    "octavo:step_bytes": "Weights and keys and values in use, each step's counted: what decode steps have to read,"
    " about.",
    "octavo:memory_bandwidth_fraction": "Those bytes of the latest steps per second, over --memory-bandwidth; without"
    " the setting it is missing.",
    "octavo:recomputed_tokens": "Tokens that were computed again behind a preemption.",
    "octavo:requests_waiting": "Choices that wait, by what the first of them waits for: blocks of the KV cache, seats"
    " in the batch, tokens of the step's budget, or other (a grammar that is compiled; the step to come).",
    "octavo:startup_seconds": "What the start of the engine process took, by phase.",
    "octavo:engine_up": "1 while requests would be answered.",
    "octavo:engine_restarts": "Engine processes that were replaced.",
    "octavo:requests_refused": "Requests that were not begun, as the queue was full, the engine away or the server at"
    " its end.",
    "octavo:http_requests": "Answers, by route and status.",
    "octavo:http_requests_running": "Requests with a body that are being answered, and responses in the background.",
}
"""What each metric means, by its name without a counter's `_total`. docs/operations.md has the same table."""

# Bounds of buckets. All but those of octavo:step_seconds are vLLM's.
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKEN_LATENCY = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_TOKENS = ()  # 1, 2, 5, 10, … up to the context
_BUCKETS: dict[str, tuple[float, ...]] = {
    "vllm:e2e_request_latency_seconds": _LATENCY,
    "vllm:request_queue_time_seconds": _LATENCY,
    "vllm:request_prefill_time_seconds": _LATENCY,
    "vllm:request_decode_time_seconds": _LATENCY,
    "vllm:request_inference_time_seconds": _LATENCY,
    "vllm:request_time_per_output_token_seconds": _TOKEN_LATENCY,
    "vllm:request_prompt_tokens": _TOKENS,
    "vllm:request_generation_tokens": _TOKENS,
    "vllm:request_max_num_generation_tokens": _TOKENS,
    "vllm:request_params_max_tokens": _TOKENS,
    "vllm:request_prefill_kv_computed_tokens": _TOKENS,
    "vllm:request_params_n": (1, 2, 5, 10, 20),
    "vllm:request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
}
"""Bounds of the histograms that take one value of each choice or request."""
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition", "timeout")
_WAIT_CAUSES = ("blocks", "seats", "tokens", "other")
_DECAY = 0.98
"""Weight of the steps before against one more, in the memory bandwidth."""

OPENMETRICS, TEXT = "application/openmetrics-text", "text/plain"
disable_created_metrics()  # one more series beside each counter and histogram, when it was made


class StepHistogram(Collector):
    """A histogram for every step: `observe` takes a sixth of `Histogram`'s time, and counts a value several times."""

    def __init__(
        self, name: str, bounds: tuple[float, ...], labels: Mapping[str, str], registry: CollectorRegistry
    ) -> None:
        self.sum = 0.0
        self._name, self._bounds, self._labels = name, bounds, labels
        self._counts = [0] * (len(bounds) + 1)
        registry.register(self)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, HELP[self._name], labels=[*self._labels])
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        family.add_metric([*self._labels.values()], [*zip(bounds, accumulate(self._counts), strict=True)], self.sum)
        return [family]


class EngineMetrics(Collector):
    """Metrics of one engine and its requests; as a collector, those that are read where they are kept."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, model_name: str, num_requests: Callable[[], int]
    ) -> None:
        """`num_requests` says how many requests with a body are being answered."""
        self._engine, self._config = engine, config
        self._labels = labels = {"model_name": model_name, "engine": "0"}
        values = labels.values()
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        ProcessCollector(namespace="octavo_engine", pid=lambda: engine.pid, registry=registry)
        self.first_token = StepHistogram("vllm:time_to_first_token_seconds", _FIRST_TOKEN, labels, registry)
        self.inter_token = StepHistogram("vllm:inter_token_latency_seconds", _TOKEN_LATENCY, labels, registry)
        self._step_tokens = StepHistogram("vllm:iteration_tokens_total", _STEP_TOKENS, labels, registry)
        self._step_seconds = StepHistogram("octavo:step_seconds", _STEP_SECONDS, labels, registry)
        info = engine.info
        self._weight_bytes, self._block_bytes = info.weight_bytes, info.kv_bytes_per_token * info.block_size
        self.num_generation_tokens = self._step_bytes = 0
        self._recent_bytes = self._recent_seconds = 0.0
        digits = range(len(str(info.max_model_len)))
        steps = [digit * 10**power for power in digits for digit in (1, 2, 5)]
        tokens = [step for step in steps if step <= info.max_model_len]
        self._histograms = {
            name: Histogram(name, HELP[name], [*labels], buckets=bounds or tokens, registry=registry).labels(*values)
            for name, bounds in _BUCKETS.items()
        }
        self.prompt_tokens = self._counter("vllm:prompt_tokens", *labels).labels(*values)
        finished = self._counter("vllm:request_success", *labels, "finished_reason")
        self._finished = {reason: finished.labels(*values, reason) for reason in _FINISH_REASONS}
        refused = self._counter("octavo:requests_refused", "reason")
        self.refused = {reason: refused.labels(reason) for reason in ("queue_full", "engine", "shutting_down")}
        self._http_requests = self._counter("octavo:http_requests", "method", "route", "status")
        running = "octavo:http_requests_running"
        Gauge(running, HELP[running], registry=registry).set_function(num_requests)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(name, HELP[name], labels, registry=self._registry)

    def _observe(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._histograms[name].observe(value)

    def note_step(self, stats: StepStats) -> None:
        """A step has been made."""
        self._step_seconds.observe(stats.step_seconds)
        self._step_tokens.observe(stats.step_tokens)
        step_bytes = self._weight_bytes + self._block_bytes * stats.num_used_blocks
        self._step_bytes += step_bytes
        self._recent_bytes = _DECAY * self._recent_bytes + step_bytes
        self._recent_seconds = _DECAY * self._recent_seconds + stats.step_seconds

    def note_choice(self, choice: ChoiceRecord) -> None:
        """A choice has ended. Where it failed it has no times, and sizes only if its prompt was computed: so the sizes
        add up to what the counters of tokens say."""
        assert choice.ended is not None
        self._finished[choice.finish_reason or "error"].inc()
        succeeded = choice.finish_reason not in FAILED
        if succeeded and choice.first_token is None:
            self.prompt_tokens.inc(choice.num_prompt_tokens)  # of an embedding
        if choice.is_counted:
            self._observe(
                {
                    "vllm:request_prompt_tokens": choice.num_prompt_tokens,
                    "vllm:request_prefill_kv_computed_tokens": choice.num_prompt_tokens - choice.num_cached_tokens,
                    "vllm:request_generation_tokens": choice.num_output_tokens,
                    "vllm:request_num_preemptions": choice.timeline.num_preemptions if choice.timeline else 0,
                    **({"vllm:request_params_max_tokens": choice.max_tokens} if choice.max_tokens else {}),
                }
            )
        if succeeded:
            phases = choice.phases(choice.ended)
            self._observe(
                {
                    "vllm:e2e_request_latency_seconds": choice.ended - choice.received,
                    "vllm:request_queue_time_seconds": phases.queue,
                    "vllm:request_prefill_time_seconds": phases.prefill,
                    "vllm:request_decode_time_seconds": phases.decode,
                    "vllm:request_inference_time_seconds": phases.prefill + phases.decode,
                    "vllm:request_time_per_output_token_seconds": choice.time_per_output_token,
                }
            )

    def note_request(self, record: RequestRecord) -> None:
        """A request has ended, and with it all of its choices."""
        self._http_requests.labels(record.method, record.route, str(record.status)).inc()
        for start in range(0, len(record.choices), record.n):
            choices = record.choices[start : start + record.n]
            if any(choice.is_counted for choice in choices):
                most = max(choice.num_output_tokens for choice in choices)
                self._observe({"vllm:request_params_n": record.n, "vllm:request_max_num_generation_tokens": most})

    def collect(self) -> Iterator[Metric]:
        stats, info = self._engine.stats(), self._engine.info
        counters, num_blocks = stats.counters, info.kv_cache_tokens // info.block_size
        cache = {
            "block_size": info.block_size,
            "num_gpu_blocks": num_blocks,
            "cache_dtype": info.kv_cache_dtype,
            "enable_prefix_caching": self._config.enable_prefix_caching,
        }
        cause, limit = stats.wait_cause or "other", self._config.memory_bandwidth
        gauge, counter = partial(self._family, GaugeMetricFamily), partial(self._family, CounterMetricFamily)
        yield gauge("vllm:num_requests_running", stats.num_running)
        yield gauge("vllm:num_requests_waiting", stats.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", stats.num_used_blocks / max(1, num_blocks))
        yield gauge("vllm:cache_config_info", {tuple(map(str, cache.values())): 1}, *cache)
        yield counter("vllm:prefix_cache_queries", counters.num_prefix_queries)
        yield counter("vllm:prefix_cache_hits", counters.num_prefix_hits)
        yield counter("vllm:num_preemptions", counters.num_preemptions)
        yield counter("vllm:generation_tokens", self.num_generation_tokens)
        yield counter("octavo:recomputed_tokens", counters.num_recomputed_tokens)
        yield counter("octavo:step_requests", counters.num_step_requests)
        yield counter("octavo:step_bytes", self._step_bytes)
        yield gauge(
            "octavo:memory_bandwidth_fraction", {} if limit is None else {(): self._bandwidth() / (limit * 1e9)}
        )
        waiting = {(one,): stats.num_waiting if one == cause else 0 for one in _WAIT_CAUSES}
        yield gauge("octavo:requests_waiting", waiting, "cause")
        phases = {(phase,): seconds for phase, seconds in info.timings.items()}
        yield gauge("octavo:startup_seconds", phases, "phase")
        yield gauge("octavo:engine_up", float(self._engine.health().status == "ok"))
        yield counter("octavo:engine_restarts", self._engine.num_restarts)

    def _family(self, kind: Any, name: str, values: float | Mapping[Any, float], *labels: str) -> Any:
        """One value, or several by the tuple of those of the `labels`."""
        family = kind(name, HELP[name], labels=[*self._labels, *labels])
        for own, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric([*self._labels.values(), *own], value)
        return family

    def _bandwidth(self) -> float:
        """Bytes per second that the latest steps read, the newest weighing most; 0 while nothing runs."""
        is_running = self._recent_seconds and self._engine.stats().num_running
        return self._recent_bytes / self._recent_seconds if is_running else 0.0

    def document(self, accept: str) -> tuple[bytes, str]:
        """All of it in the form that a client that sends this `Accept` likes best, with its media type."""
        # Colons need no escaping; without being told so, the encoders take them for wrong.
        if _quality(accept, OPENMETRICS) > _quality(accept, TEXT):
            return openmetrics.generate_latest(self._registry, openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry, openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


def _quality(accept: str, media_type: str) -> float:
    """How much a client that sends this `Accept` wants the type, which it has to name."""
    qualities = [0.0]
    for entry in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in entry.split(";"))
        if kind == media_type:
            given = next((piece[2:] for piece in parameters if piece.startswith("q=")), "1")
            qualities.append(float(given) if re.fullmatch(r"\d(\.\d{1,3})?", given) else 1.0)
    return max(qualities)
