"""Every metric: its name, its kind, its meaning, and where its value comes from.

Names that begin with `vllm:` mean what they mean in vLLM, so that what was made for it fits. docs/operations.md has the
same table.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from configs.settings import ServerConfig
from engine.messages import CoreReady, StepStats
from engine.supervisor import EngineHealth
from server.metrics.figures import Figures
from server.metrics.histogram import Histogram

Value = float | Histogram
Sample = tuple[tuple[str, ...], Value]
"""Values of a family's own labels, and what is measured."""
WAIT_CAUSES = ("blocks", "seats", "tokens")


class EngineStats(Protocol):
    """Of the engine, what is told here; the docstrings of `AsyncEngine` hold."""

    @property
    def info(self) -> CoreReady: ...
    @property
    def num_restarts(self) -> int: ...

    def stats(self) -> StepStats: ...

    def health(self) -> EngineHealth: ...


@dataclass(frozen=True)
class Source:
    """What one scrape sees."""

    figures: Figures
    info: CoreReady
    stats: StepStats
    health: EngineHealth
    num_restarts: int
    num_requests: int
    config: ServerConfig

    @property
    def num_blocks(self) -> int:
        return self.info.kv_cache_tokens // self.info.block_size


@dataclass(frozen=True)
class Family:
    name: str
    """Without the `_total` of counters."""
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    read: Callable[[Source], Value | Iterable[Sample]]
    """One value, or samples with labels."""
    labels: tuple[str, ...] = field(default=())
    of_engine: bool = True
    """Has the labels `model_name` and `engine` too."""

    @property
    def shown_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def samples(self, source: Source) -> Iterable[Sample]:
        read = self.read(source)
        return [((), read)] if isinstance(read, int | float | Histogram) else read


def _engine() -> list[Family]:
    return [
        Family("vllm:num_requests_running", "gauge", "Choices that are computed now.", lambda s: s.stats.num_running),
        Family(
            "vllm:num_requests_waiting", "gauge", "Choices that wait for their turn.", lambda s: s.stats.num_waiting
        ),
        Family(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "Share of the KV cache's blocks that choices hold; 1 is all of them.",
            lambda s: s.stats.num_used_blocks / max(1, s.num_blocks),
        ),
        Family(
            "vllm:prefix_cache_queries",
            "counter",
            "Tokens that were looked for in the prefix cache.",
            lambda s: s.stats.counters.num_prefix_queries,
        ),
        Family(
            "vllm:prefix_cache_hits",
            "counter",
            "Tokens that were found there, and so not computed.",
            lambda s: s.stats.counters.num_prefix_hits,
        ),
        Family(
            "vllm:num_preemptions",
            "counter",
            "How often a running choice had to give its blocks to others.",
            lambda s: s.stats.counters.num_preemptions,
        ),
        Family("vllm:cache_config_info", "gauge", "What the KV cache is like, in labels; always 1.", *_cache_config()),
    ]


def _cache_config() -> tuple[Callable[[Source], list[Sample]], tuple[str, ...]]:
    labels = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")

    def read(source: Source) -> list[Sample]:
        info, caches_prefixes = source.info, source.config.enable_prefix_caching
        return [(tuple(map(str, (info.block_size, source.num_blocks, info.kv_cache_dtype, caches_prefixes))), 1)]

    return read, labels


def _requests() -> list[Family]:
    return [
        Family(
            "vllm:prompt_tokens",
            "counter",
            "Tokens of prompts, cached ones too.",
            lambda s: s.figures.num_prompt_tokens,
        ),
        Family(
            "vllm:generation_tokens", "counter", "Tokens that were generated.", lambda s: s.figures.num_output_tokens
        ),
        Family(
            "vllm:request_success",
            "counter",
            "Choices that have ended, by finish reason.",
            lambda s: [((reason,), count) for reason, count in s.figures.finished.items()],
            ("finished_reason",),
        ),
        Family(
            "vllm:request_prompt_tokens", "histogram", "Tokens of a choice's prompt.", lambda s: s.figures.prompt_tokens
        ),
        Family(
            "vllm:request_generation_tokens",
            "histogram",
            "Tokens of a choice's output.",
            lambda s: s.figures.output_tokens,
        ),
        Family(
            "vllm:request_max_num_generation_tokens",
            "histogram",
            "Tokens of the longest output among the choices of a prompt.",
            lambda s: s.figures.most_output_tokens,
        ),
        Family(
            "vllm:request_params_n", "histogram", "Choices that were asked for per prompt.", lambda s: s.figures.choices
        ),
        Family(
            "vllm:request_params_max_tokens",
            "histogram",
            "Most output tokens that were asked for, where they were.",
            lambda s: s.figures.max_tokens,
        ),
        Family(
            "vllm:request_prefill_kv_computed_tokens",
            "histogram",
            "Tokens of a choice's prompt that were not cached.",
            lambda s: s.figures.computed_tokens,
        ),
        Family(
            "vllm:request_num_preemptions",
            "histogram",
            "How often a choice was preempted.",
            lambda s: s.figures.preemptions,
        ),
    ]


def _times() -> list[Family]:
    return [
        Family(
            "vllm:time_to_first_token_seconds",
            "histogram",
            "From the request's arrival to a choice's first token.",
            lambda s: s.figures.first_token,
        ),
        Family(
            "vllm:inter_token_latency_seconds",
            "histogram",
            "Between two tokens of a choice, each pair counted.",
            lambda s: s.figures.inter_token,
        ),
        Family(
            "vllm:request_time_per_output_token_seconds",
            "histogram",
            "Between two tokens of a choice, the mean of each choice counted once.",
            lambda s: s.figures.per_output_token,
        ),
        Family(
            "vllm:e2e_request_latency_seconds",
            "histogram",
            "From the request's arrival to a choice's end.",
            lambda s: s.figures.e2e,
        ),
        Family(
            "vllm:request_queue_time_seconds",
            "histogram",
            "From the queue to the first step.",
            lambda s: s.figures.queue,
        ),
        Family(
            "vllm:request_prefill_time_seconds",
            "histogram",
            "From the first step to the first token.",
            lambda s: s.figures.prefill,
        ),
        Family(
            "vllm:request_decode_time_seconds",
            "histogram",
            "From the first token to the last one.",
            lambda s: s.figures.decode,
        ),
        Family(
            "vllm:request_inference_time_seconds",
            "histogram",
            "From the first step to the last token.",
            lambda s: s.figures.inference,
        ),
        Family("vllm:iteration_tokens_total", "histogram", "Tokens of a step.", lambda s: s.figures.step_tokens),
    ]


def _own() -> list[Family]:
    return [
        Family("octavo:step_seconds", "histogram", "How long a step takes.", lambda s: s.figures.step_seconds),
        Family(
            "octavo:step_requests",
            "counter",
            "Choices in steps, each step's counted: over that of steps, the mean batch.",
            lambda s: s.stats.counters.num_step_requests,
        ),
        Family(
            "octavo:step_bytes",
            "counter",
            "Weights and keys and values in use, each step's counted: what decode steps have to read, about.",
            lambda s: s.figures.step_bytes,
        ),
        Family(
            "octavo:memory_bandwidth_fraction",
            "gauge",
            "Those bytes of the latest steps per second, over --memory-bandwidth; without the setting it is missing.",
            _bandwidth_fraction,
        ),
        Family(
            "octavo:recomputed_tokens",
            "counter",
            "Tokens that were computed again behind a preemption.",
            lambda s: s.stats.counters.num_recomputed_tokens,
        ),
        Family(
            "octavo:requests_waiting",
            "gauge",
            "Choices that wait, by what the first of them waits for: blocks of the KV cache, seats in the batch, tokens"
            " of the step's budget, or other (a grammar that is compiled; the step to come).",
            _waiting,
            ("cause",),
        ),
        Family(
            "octavo:startup_seconds",
            "gauge",
            "What the start of the engine process took, by phase.",
            lambda s: [((phase,), seconds) for phase, seconds in s.info.timings.items()],
            ("phase",),
        ),
        Family(
            "octavo:engine_up", "gauge", "1 while requests would be answered.", lambda s: float(s.health.status == "ok")
        ),
        Family("octavo:engine_restarts", "counter", "Engine processes that were replaced.", lambda s: s.num_restarts),
        Family(
            "octavo:requests_refused",
            "counter",
            "Requests that were not begun, as the queue was full, the engine away or the server at its end.",
            lambda s: [((reason,), count) for reason, count in s.figures.refused.items()],
            ("reason",),
            of_engine=False,
        ),
        Family(
            "octavo:http_requests",
            "counter",
            "Answers, by route and status.",
            lambda s: list(s.figures.http.items()),
            ("method", "route", "status"),
            of_engine=False,
        ),
        Family(
            "octavo:http_requests_running",
            "gauge",
            "Requests with a body that are being answered, and responses in the background.",
            lambda s: s.num_requests,
            of_engine=False,
        ),
    ]


def _bandwidth_fraction(source: Source) -> list[Sample]:
    limit = source.config.memory_bandwidth
    if limit is None:
        return []
    return [((), source.figures.bytes_per_second / (limit * 1e9) if source.stats.num_running else 0.0)]


def _waiting(source: Source) -> list[Sample]:
    cause = source.stats.wait_cause or "other"
    return [((one,), source.stats.num_waiting if one == cause else 0) for one in (*WAIT_CAUSES, "other")]


FAMILIES = [*_engine(), *_requests(), *_times(), *_own()]
