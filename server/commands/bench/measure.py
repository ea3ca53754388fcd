"""What came of a load, its figures, under vLLM's names where they mean the same, and what repeated runs say together.

A load test is wrong where its client is late: tokens that waited to be read look like slow tokens, and requests that
were sent late are not the load that was asked for. Three things are watched: how late the event loop runs a timer, how
late requests begin against the time they were due, and the share of a core that the client uses.
"""

import argparse
import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import numpy as np

from .target import Response

TICK = 0.005
MAX_CPU_SHARE = 0.9
"""Of the one core that the client can use. Beyond it, throughput may be the client's."""
MAX_SHARE_OF_FIGURE = 0.1
"""A latency is wrong when the same figure of the client's lateness, P99 for P99, is more than this share of it."""
CLOCK_STEP = 0.002
"""Timers of an event loop have steps of a millisecond: less lateness than two of them says nothing."""
NONE = (0.0,)
"""In place of no lateness at all."""

SUMS = (
    *("duration", "completed", "failed", "total_input_tokens", "total_cached_tokens", "total_output_tokens"),
    *("probe_completed", "probe_failed"),
)
PEAKS = ("max_output_tokens_per_s", "peak_concurrent_requests", "probe_max_e2el_ms")
"""Figures that are added over repeated runs, and those of which the highest counts; of others the mean does."""

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Quantile 0.975 of Student's t for 1, 2, … degrees of freedom; beyond them the last is a little too wide."""

Figure = Callable[[Sequence[float]], Any]
"""A mean or a percentile."""


def percentile(rank: float) -> Figure:
    """Interpolated between the nearest two."""
    return lambda values: np.percentile(values, rank)


class ClientHealth:
    """The client's lateness in seconds, and its share of a core."""

    def __init__(self) -> None:
        self.cpu_share = 0.0
        self.loop_lags: list[float] = []
        self.late_sends: list[float] = []
        """Of an open loop; a closed one sends when it can."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch this process; garbage collection, which would stop it for milliseconds, is off meanwhile."""
        gc.collect()
        gc.freeze()
        gc.disable()
        ticking = asyncio.create_task(self._tick())
        began, busy = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.cpu_share = (time.process_time() - busy) / (time.perf_counter() - began)
            ticking.cancel()
            gc.unfreeze()
            gc.enable()

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self.loop_lags.append(max(0.0, time.perf_counter() - due))

    @property
    def why_too_busy(self) -> str | None:
        """Why no rate and no time per token is to be trusted; None when they are."""
        is_busy = self.cpu_share > MAX_CPU_SHARE
        return f"the client used {self.cpu_share:.0%} of the one core that it can use" if is_busy else None

    def why_wrong(self, metric: str, figure: Figure, value: float) -> str | None:
        """Why a latency of `value` seconds says more of the client than of the server; None when it does not.

        A first token and an end are late by what their sending and their reading were late; what lies between two
        tokens only by the latter; an average over many tokens only suffers from a client without a break.
        """
        if metric == "tpot":
            return self.why_too_busy
        lateness = figure(self.loop_lags or NONE) + (0.0 if metric == "itl" else figure(self.late_sends or NONE))
        is_late = lateness > max(CLOCK_STEP, MAX_SHARE_OF_FIGURE * value)
        return f"the client was {lateness * 1e3:.1f} ms late" if is_late else None

    def as_json(self) -> dict[str, float]:
        found = {"cpu_share": round(self.cpu_share, 3)}
        for what, values in {"loop_lag": self.loop_lags, "late_send": self.late_sends}.items():
            found[f"mean_{what}_ms"] = round(float(np.mean(values or NONE)) * 1e3, 3)
            found[f"p99_{what}_ms"] = round(float(np.percentile(values or NONE, 99)) * 1e3, 3)
        return found


@dataclass
class Run:
    """What came of offering some samples; the responses are in the order of their ends."""

    on_response: Callable[[Response], bool] = field(default=lambda response: False)
    """Called with each whole response; true ends the run early."""
    work: asyncio.Task[None] | None = None
    responses: list[Response] = field(default_factory=list)
    probes: list[Response] = field(default_factory=list)
    began: float = 0.0
    duration: float = 0.0
    health: ClientHealth = field(default_factory=ClientHealth)
    interrupted: bool = False
    """By Ctrl-C: what was under way is missing."""
    stopped: bool = False
    """Because more responses would change nothing: what was under way is missing."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Those that `measure` has found."""

    def keep(self, response: Response) -> None:
        self.responses.append(response)
        if self.on_response(response) and self.work is not None:
            self.stopped = True
            self.work.cancel()

    def measure(self, arguments: argparse.Namespace) -> None:
        """Counts, rates, and the mean, median, std and percentiles of latencies in milliseconds.

        A figure is None where there was nothing to measure, and where it is the client's, as `client` gives reasons.
        """
        done, goodput = whole(self.responses), arguments.goodput
        prompt_tokens, output_tokens = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
        num_good = sum(is_good(response, goodput) for response in self.responses)
        per_second = 1 / self.duration if self.duration else 0.0
        rates = {
            "request_throughput": len(done) * per_second,
            "request_goodput": num_good * per_second if goodput else None,
            "output_throughput": output_tokens * per_second,
            "total_token_throughput": (prompt_tokens + output_tokens) * per_second,
            "max_output_tokens_per_s": max(tokens_by_second(done, self.began), default=0.0),
        }
        found = {
            "duration": self.duration,
            "completed": len(done),
            "failed": len(self.responses) - len(done),
            "total_input_tokens": prompt_tokens,
            "total_cached_tokens": sum(r.cached_tokens for r in done),
            "total_output_tokens": output_tokens,
            **rates,
            "good_share": num_good / len(self.responses) if goodput and self.responses else None,
            "peak_concurrent_requests": max((level for _, level in concurrency(self.responses, 0.0)), default=0),
        }
        reasons: dict[str, str] = {}
        for metric in arguments.percentile_metrics:
            seconds = samples(done, metric)
            found[f"std_{metric}_ms"] = float(np.std(seconds)) * 1e3 if seconds else None
            for name, figure in kinds(metric, arguments.metric_percentiles).items():
                value = float(figure(seconds)) if seconds else None
                found[name] = None if value is None else value * 1e3
                if value is not None and (why := self.health.why_wrong(metric, figure, value)):
                    reasons[name] = reasons[f"std_{metric}_ms"] = why
        mean_is_late = self.health.why_wrong("e2el", np.mean, fmean(samples(done, "e2el"))) if done else None
        if why := self.health.why_too_busy or mean_is_late:
            reasons |= dict.fromkeys(rates, why)
        client = {"bottleneck": bool(reasons), "reasons": reasons, **self.health.as_json()}
        self.figures = found | dict.fromkeys(reasons) | _probe_figures(self.probes) | {"client": client}


def _probe_figures(probes: Sequence[Response]) -> dict[str, Any]:
    ms = [response.e2el * 1e3 for response in whole(probes)]
    latencies: dict[str, Figure] = {"median": np.median, "p99": percentile(99), "max": max}
    found = {f"probe_{name}_e2el_ms": float(figure(ms)) if ms else None for name, figure in latencies.items()}
    return {"probe_completed": len(ms), "probe_failed": len(probes) - len(ms), **found} if probes else {}


def whole(responses: Sequence[Response]) -> list[Response]:
    """Those that did not fail."""
    return [response for response in responses if not response.error]


def by_due(responses: Sequence[Response]) -> list[Response]:
    """In the order in which they should have been sent."""
    return sorted(responses, key=lambda response: response.due)


def samples(responses: Sequence[Response], metric: str) -> list[float]:
    """Seconds of each of the responses that have the metric, or of each gap between two tokens."""
    if metric == "itl":
        return [gap for response in responses for gap in response.itl]
    values = (getattr(response, metric) for response in responses)
    return [value for value in values if value is not None]


def kinds(metric: str, percentiles: Sequence[float]) -> dict[str, Figure]:
    """The figures of a latency, by their names."""
    named: dict[str, Figure] = {f"mean_{metric}_ms": np.mean, f"median_{metric}_ms": np.median}
    return named | {f"p{rank:g}_{metric}_ms": percentile(rank) for rank in percentiles}


def is_good(response: Response, goodput: Mapping[str, float]) -> bool:
    """Whether it is whole and within every limit in milliseconds; one token has no time per token to be too long."""
    if response.error:
        return False
    return all((getattr(response, name) or 0.0) * 1e3 <= limit for name, limit in goodput.items())


def tokens_by_second(responses: Sequence[Response], began: float) -> list[float]:
    """Output tokens in each second of a run. The tokens of a response are shared evenly among its events."""
    seconds = [int(time - began) for response in responses for time in response.token_times]
    weights = [r.output_tokens / len(r.token_times) for r in responses for _ in r.token_times]
    return [float(tokens) for tokens in np.bincount(seconds, weights)] if seconds else []


def concurrency(responses: Sequence[Response], began: float) -> list[tuple[float, int]]:
    """Steps of the number of requests under way: the time in the run, and the number from then on."""
    # at equal times ends come first: a user who asks again is one request
    changes = sorted([(r.started - began, 1) for r in responses] + [(r.end - began, -1) for r in responses])
    levels = np.cumsum([change for _, change in changes])
    return [(time, int(level)) for (time, _), level in zip(changes, levels, strict=True)]


@dataclass
class Trial:
    """One run, or several under equal conditions."""

    rate: float
    """Requests per second that were offered; infinite for a closed loop and a ramp."""
    runs: list[Run]
    side: str = ""
    """Which of two servers this is."""
    interrupted: bool = False

    @property
    def name(self) -> str:
        return self.side or (f"{self.rate:.4g} requests/s" if math.isfinite(self.rate) else "all runs")

    @property
    def responses(self) -> list[Response]:
        return [response for run in self.runs for response in run.responses]

    @property
    def figures(self) -> dict[str, Any]:
        """Counts are added, peaks are the highest, and all else are means with their 95 % confidence intervals."""
        repeats = [run.figures for run in self.runs]
        if len(repeats) == 1:
            return dict(repeats[0])
        found: dict[str, Any] = {}
        confidence: dict[str, list[float]] = {}
        for name in (name for name in repeats[0] if name != "client"):
            numbers = [each[name] for each in repeats if each.get(name) is not None]
            if len(numbers) < len(repeats):
                found[name] = None
            elif name in SUMS or name in PEAKS:
                found[name] = (sum if name in SUMS else max)(numbers)
            else:
                found[name] = fmean(numbers)
                confidence[name] = interval(numbers)
        clients = [each["client"] for each in repeats]
        client = {name: max(each[name] for each in clients) for name in clients[0] if name != "reasons"}
        client["reasons"] = {what: why for each in clients for what, why in each["reasons"].items()}
        return {**found, "client": client, "confidence_95": confidence, "repeats": repeats}

    @property
    def error_counts(self) -> dict[str, int]:
        """How often each message came, the most frequent first."""
        return dict(Counter(r.error for r in self.responses if r.error).most_common())

    @property
    def details(self) -> dict[str, list[Any]]:
        """Each request of all runs, as vLLM's --save-detailed has them: seconds, 0 and empty lists where it failed."""
        ordered = [response for run in self.runs for response in by_due(run.responses)]
        columns = {
            "input_lens": "prompt_tokens",
            "output_lens": "output_tokens",
            "ttfts": "ttft",
            "itls": "itl",
            "latencies": "e2el",
            "start_times": "due",
            "queue_times": "client_queue_time",
            "generated_texts": "text",
            "errors": "error",
        }
        return {column: [getattr(response, name) for response in ordered] for column, name in columns.items()}


def interval(values: Sequence[float]) -> list[float]:
    """The 95 % confidence interval of the mean of at least two values, by Student's t."""
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * stdev(values) / math.sqrt(len(values))
    return [fmean(values) - half, fmean(values) + half]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, list[float] | None]:
    """The geometric mean of theirs / ours, pair by pair, and its 95 % confidence interval, None for a single pair."""
    logs = [math.log(b / a) for a, b in zip(ours, theirs, strict=True)]
    return math.exp(fmean(logs)), [math.exp(end) for end in interval(logs)] if len(logs) > 1 else None
