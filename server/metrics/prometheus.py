"""The metrics that Prometheus reads.

Names that begin with `vllm:` mean what they mean in vLLM, so that what was made for it fits.
"""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from engine.messages import StepStats
from server.metrics.records import FAILED, ChoiceRecord, RequestRecord

# docs/operations.md has the same tables.
METRICS = {
    "vllm:num_requests_running": "Choices that are computed now.",
    "vllm:num_requests_waiting": "Choices that wait for their turn.",
    "vllm:kv_cache_usage_perc": "Share of the KV cache's blocks that choices hold; 1 is all of them.",
    "vllm:prefix_cache_queries_total": "Tokens that were looked for in the prefix cache.",
    "vllm:prefix_cache_hits_total": "Tokens that were found there, and so not computed.",
    "vllm:num_preemptions_total": "How often a running choice had to give its blocks to others.",
    "vllm:cache_config_info": "What the KV cache is like, in labels; always 1.",
    "vllm:prompt_tokens_total": "Tokens of prompts, cached ones too.",
    "vllm:generation_tokens_total": "Tokens that were generated.",
    "vllm:request_success_total": "Choices that have ended, by finish reason.",
    "octavo:step_requests_total": "Choices in steps, each step's counted: over that of steps, the mean batch.",
    "octavo:step_bytes_total": "Weights and keys and values in use, each step's counted: what decode steps have to"
    " read, about.",
    "octavo:memory_bandwidth_fraction": "Those bytes of the latest steps per second, over --memory-bandwidth; without"
    " the setting it is missing.",
    "octavo:recomputed_tokens_total": "Tokens that were computed again behind a preemption.",
    "octavo:requests_waiting": "Choices that wait, by what the first of them waits for: blocks of the KV cache, seats"
    " in the batch, tokens of the step's budget, or other (a grammar that is compiled; the step to come).",
    "octavo:startup_seconds": "What the start of the engine process took, by phase.",
    "octavo:engine_up": "1 while requests would be answered.",
    "octavo:engine_restarts_total": "Engine processes that were replaced.",
    "octavo:requests_refused_total": "Requests that were not begun, as the queue was full, the engine away or the"
    " server at its end.",
    "octavo:http_requests_total": "Answers, by route and status.",
    "octavo:http_requests_running": "Requests with a body that are being answered, and responses in the background.",
}
"""What gauges, and counters with `_total`, mean."""
LABELS = {
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
    "vllm:request_success_total": ("finished_reason",),
    "octavo:requests_waiting": ("cause",),
    "octavo:startup_seconds": ("phase",),
    "octavo:requests_refused_total": ("reason",),
    "octavo:http_requests_total": ("method", "route", "status"),
}
_OF_SERVER = ("octavo:requests_refused_total", "octavo:http_requests_total", "octavo:http_requests_running")
"""Those without the labels of the model."""

# Bounds of buckets. All but those of octavo:step_seconds are vLLM's.
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKEN_LATENCY = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_TOKENS = ()  # 1, 2, 5, 10, … up to the context
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "vllm:request_prompt_tokens": (_TOKENS, "Tokens of a choice's prompt."),
    "vllm:request_generation_tokens": (_TOKENS, "Tokens of a choice's output."),
    "vllm:request_max_num_generation_tokens": (
        _TOKENS,
        "Tokens of the longest output among the choices of a prompt.",
    ),
    "vllm:request_params_n": ((1, 2, 5, 10, 20), "Choices that were asked for per prompt."),
    "vllm:request_params_max_tokens": (_TOKENS, "Most output tokens that were asked for, where they were."),
    "vllm:request_prefill_kv_computed_tokens": (_TOKENS, "Tokens of a choice's prompt that were not cached."),
    "vllm:request_num_preemptions": ((1, 2, 3, 4, 5, 10, 20), "How often a choice was preempted."),
    "vllm:time_to_first_token_seconds": (_FIRST_TOKEN, "From the request's arrival to a choice's first token."),
    "vllm:inter_token_latency_seconds": (_TOKEN_LATENCY, "Between two tokens of a choice, each pair counted."),
    "vllm:request_time_per_output_token_seconds": (
        _TOKEN_LATENCY,
        "Between two tokens of a choice, the mean of each choice counted once.",
    ),
    "vllm:e2e_request_latency_seconds": (_LATENCY, "From the request's arrival to a choice's end."),
    "vllm:request_queue_time_seconds": (_LATENCY, "From the queue to the first step."),
    "vllm:request_prefill_time_seconds": (_LATENCY, "From the first step to the first token."),
    "vllm:request_decode_time_seconds": (_LATENCY, "From the first token to the last one."),
    "vllm:request_inference_time_seconds": (_LATENCY, "From the first step to the last token."),
    "vllm:iteration_tokens_total": (_STEP_TOKENS, "Tokens of a step."),
    "octavo:step_seconds": (_STEP_SECONDS, "How long a step takes."),
}
"""Bounds and help by name."""
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition", "timeout")
_WAIT_CAUSES = ("blocks", "seats", "tokens", "other")
_DECAY = 0.98
"""Weight of the steps before against one more, in the memory bandwidth."""
OPENMETRICS, TEXT = "application/openmetrics-text", "text/plain"


class Histogram:
    """Like prometheus_client's, in a sixth of its time; a value may count several times."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with the number of values up to it."""
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        return [*zip(bounds, accumulate(self._counts), strict=True)]


class EngineMetrics(Collector):
    """Metrics of one engine and its requests, and the registry that shows them."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, model_name: str, num_requests: Callable[[], int]
    ) -> None:
        """`num_requests` says how many requests with a body are being answered."""
        self._engine, self._config, self._num_requests = engine, config, num_requests
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        ProcessCollector(namespace="octavo_engine", pid=lambda: engine.pid, registry=self._registry)
        info = engine.info
        steps = [digit * 10**power for power in range(len(str(info.max_model_len))) for digit in (1, 2, 5)]
        tokens = [step for step in steps if step <= info.max_model_len]
        self._histograms = {name: Histogram(bounds or tokens) for name, (bounds, _) in HISTOGRAMS.items()}
        self.first_token = self._histograms["vllm:time_to_first_token_seconds"]
        self.inter_token = self._histograms["vllm:inter_token_latency_seconds"]
        self._step_tokens = self._histograms["vllm:iteration_tokens_total"]
        self._step_seconds = self._histograms["octavo:step_seconds"]
        self._weight_bytes, self._block_bytes = info.weight_bytes, info.kv_bytes_per_token * info.block_size
        self.num_prompt_tokens = self.num_generation_tokens = self._step_bytes = 0
        self._recent_bytes = self._recent_seconds = 0.0
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self.refused = dict.fromkeys(("queue_full", "engine", "shutting_down"), 0)
        self._http_requests = Counter[tuple[str, str, str]]()

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
        self._finished[choice.finish_reason or "error"] += 1
        values: dict[str, float] = {}
        if choice.is_counted:
            values = {
                "vllm:request_prompt_tokens": choice.num_prompt_tokens,
                "vllm:request_prefill_kv_computed_tokens": choice.num_prompt_tokens - choice.num_cached_tokens,
                "vllm:request_generation_tokens": choice.num_output_tokens,
                "vllm:request_num_preemptions": choice.timeline.num_preemptions,
            }
            if choice.max_tokens:
                values["vllm:request_params_max_tokens"] = choice.max_tokens
        if choice.finish_reason not in FAILED:
            if choice.first_token is None:
                self.num_prompt_tokens += choice.num_prompt_tokens  # of an embedding
            _, queue, prefill, decode = choice.phases(choice.ended)
            values |= {
                "vllm:e2e_request_latency_seconds": choice.ended - choice.received,
                "vllm:request_queue_time_seconds": queue,
                "vllm:request_prefill_time_seconds": prefill,
                "vllm:request_decode_time_seconds": decode,
                "vllm:request_inference_time_seconds": prefill + decode,
                "vllm:request_time_per_output_token_seconds": choice.time_per_output_token,
            }
        for name, value in values.items():
            self._histograms[name].observe(value)

    def note_request(self, record: RequestRecord) -> None:
        """A request has ended, and with it all of its choices."""
        self._http_requests[record.method, record.route, str(record.status)] += 1
        for start in range(0, len(record.choices), record.n):
            choices = record.choices[start : start + record.n]
            if any(choice.is_counted for choice in choices):
                self._histograms["vllm:request_params_n"].observe(record.n)
                longest = max(choice.num_output_tokens for choice in choices)
                self._histograms["vllm:request_max_num_generation_tokens"].observe(longest)

    def _values(self) -> dict[str, float | Mapping[Any, float]]:
        """Of gauges and counters, where they have labels by those labels' values."""
        engine, config, info, stats = self._engine, self._config, self._engine.info, self._engine.stats()
        counters, num_blocks = stats.counters, info.kv_cache_tokens // info.block_size
        cache = (info.block_size, num_blocks, info.kv_cache_dtype, config.enable_prefix_caching)
        cause, limit = stats.wait_cause or "other", config.memory_bandwidth
        bandwidth = self._recent_bytes / self._recent_seconds if self._recent_seconds and stats.num_running else 0.0
        return {
            "vllm:num_requests_running": stats.num_running,
            "vllm:num_requests_waiting": stats.num_waiting,
            "vllm:kv_cache_usage_perc": stats.num_used_blocks / max(1, num_blocks),
            "vllm:cache_config_info": {tuple(map(str, cache)): 1},
            "vllm:prefix_cache_queries_total": counters.num_prefix_queries,
            "vllm:prefix_cache_hits_total": counters.num_prefix_hits,
            "vllm:num_preemptions_total": counters.num_preemptions,
            "vllm:prompt_tokens_total": self.num_prompt_tokens,
            "vllm:generation_tokens_total": self.num_generation_tokens,
            "vllm:request_success_total": self._finished,
            "octavo:step_requests_total": counters.num_step_requests,
            "octavo:step_bytes_total": self._step_bytes,
            "octavo:memory_bandwidth_fraction": {(): bandwidth / (limit * 1e9)} if limit else {},
            "octavo:recomputed_tokens_total": counters.num_recomputed_tokens,
            "octavo:requests_waiting": {one: stats.num_waiting if one == cause else 0 for one in _WAIT_CAUSES},
            "octavo:startup_seconds": info.timings,
            "octavo:engine_up": float(engine.health().status == "ok"),
            "octavo:engine_restarts_total": engine.num_restarts,
            "octavo:requests_refused_total": self.refused,
            "octavo:http_requests_total": self._http_requests,
            "octavo:http_requests_running": self._num_requests(),
        }

    def collect(self) -> Iterator[Metric]:
        for name, value in self._values().items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            shared = {} if name in _OF_SERVER else self._labels
            family: Any = kind(name, METRICS[name], labels=[*shared, *LABELS.get(name, ())])
            for own, number in value.items() if isinstance(value, Mapping) else [((), value)]:
                family.add_metric([*shared.values(), *([own] if isinstance(own, str) else own)], number)
            yield family
        for name, (_, text) in HISTOGRAMS.items():
            histogram, family = self._histograms[name], HistogramMetricFamily(name, text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], histogram.buckets(), histogram.sum)
            yield family

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
