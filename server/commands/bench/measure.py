"""From responses to figures, under vLLM's names where they mean the same, and what repeated runs say together."""

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import numpy as np

from .client_health import Figure, percentile
from .load import Run
from .target import Response

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


@dataclass
class Trial:
    """One run, or several under equal conditions."""

    rate: float
    """Requests per second that were offered; infinite for a closed loop and a ramp."""
    runs: list[Run] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    """Of each run."""
    interrupted: bool = False

    @property
    def combined(self) -> dict[str, Any]:
        return combine(self.figures)

    @property
    def responses(self) -> list[Response]:
        return [response for run in self.runs for response in run.responses]


def whole(responses: Sequence[Response]) -> list[Response]:
    """Those that did not fail."""
    return [response for response in responses if response.error is None]


def measured(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Counts, rates, and the mean, median, std and percentiles of latencies in milliseconds.

    A figure is None where there was nothing to measure, and where it is the client's for a reason that `client` gives.
    """
    done, goodput = whole(run.responses), arguments.goodput
    prompt_tokens, output_tokens = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    good = sum(is_good(response, goodput) for response in run.responses)
    per_second = 1 / run.duration if run.duration else 0.0
    rates = {
        "request_throughput": len(done) * per_second,
        "request_goodput": good * per_second if goodput else None,
        "output_throughput": output_tokens * per_second,
        "total_token_throughput": (prompt_tokens + output_tokens) * per_second,
        "max_output_tokens_per_s": max(tokens_by_second(done, run.began), default=0.0),
    }
    found = {
        "duration": run.duration,
        "completed": len(done),
        "failed": len(run.responses) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_cached_tokens": sum(r.cached_tokens for r in done),
        "total_output_tokens": output_tokens,
        **rates,
        "good_share": good / len(run.responses) if goodput and run.responses else None,
        "peak_concurrent_requests": max((level for _, level in concurrency(run.responses, 0.0)), default=0),
    }
    reasons: dict[str, str] = {}
    for metric in arguments.percentile_metrics:
        seconds = samples(done, metric)
        found[f"std_{metric}_ms"] = float(np.std(seconds)) * 1e3 if seconds else None
        for name, figure in kinds(metric, arguments.metric_percentiles).items():
            value = float(figure(seconds)) if seconds else None
            found[name] = None if value is None else value * 1e3
            if value is not None and (why := run.health.why_wrong(metric, figure, value)):
                reasons[name] = reasons[f"std_{metric}_ms"] = why
    mean_is_late = run.health.why_wrong("e2el", np.mean, fmean(samples(done, "e2el"))) if done else None
    if why := run.health.why_too_busy or mean_is_late:
        reasons |= dict.fromkeys(rates, why)
    found |= dict.fromkeys(reasons) | _probe_figures(run.probes)
    return found | {"client": {"bottleneck": bool(reasons), "reasons": reasons, **run.health.as_json()}}


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
    if response.error is not None:
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


def errors_of(responses: Sequence[Response]) -> dict[str, int]:
    """How often each message came, the most frequent first."""
    return dict(Counter(response.error for response in responses if response.error is not None).most_common())


def details(trial: Trial) -> dict[str, list[Any]]:
    """Each request of all runs, as vLLM's --save-detailed has them: seconds, 0 and empty lists where it failed."""
    ordered = [r for run in trial.runs for r in sorted(run.responses, key=lambda response: response.due)]
    return {
        "input_lens": [r.prompt_tokens for r in ordered],
        "output_lens": [r.output_tokens for r in ordered],
        "ttfts": [0.0 if r.error else r.ttft for r in ordered],
        "itls": [[] if r.error else r.itl for r in ordered],
        "latencies": [0.0 if r.error else r.e2el for r in ordered],
        "start_times": [r.due for r in ordered],
        "queue_times": [r.client_queue_time for r in ordered],
        "generated_texts": [r.text for r in ordered],
        "errors": [r.error or "" for r in ordered],
    }


def _probe_figures(probes: Sequence[Response]) -> dict[str, Any]:
    if not probes:
        return {}
    ms = [response.e2el * 1e3 for response in whole(probes)]
    latencies: dict[str, Figure] = {"median": np.median, "p99": percentile(99), "max": max}
    found = {f"probe_{name}_e2el_ms": float(figure(ms)) if ms else None for name, figure in latencies.items()}
    return {"probe_completed": len(ms), "probe_failed": len(probes) - len(ms), **found}


def combine(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts are added, peaks are the highest, and all else are means with their 95 % confidence intervals."""
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
    return {**found, "client": client, "confidence_95": confidence, "repeats": list(repeats)}


def interval(values: Sequence[float]) -> list[float]:
    """The 95 % confidence interval of the mean of at least two values, by Student's t."""
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * stdev(values) / math.sqrt(len(values))
    return [fmean(values) - half, fmean(values) + half]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, list[float] | None]:
    """The geometric mean of theirs / ours, pair by pair, and its 95 % confidence interval, None for a single pair."""
    logs = [math.log(b / a) for a, b in zip(ours, theirs, strict=True)]
    return math.exp(fmean(logs)), [math.exp(end) for end in interval(logs)] if len(logs) > 1 else None
