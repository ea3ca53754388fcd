"""From answers to figures, under vLLM's names where they mean the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .answer import Answer
from .driver import Run
from .saturation import Figure, percentile

THROUGHPUTS = (
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
)
Goodput = Mapping[str, float]
"""Milliseconds that ttft, tpot and e2el may take."""


def figures(run: Run, goodput: Goodput, percentiles: Sequence[float], metrics: Sequence[str]) -> dict[str, Any]:
    """Counts, rates, and the mean, median, std and percentiles of `metrics` in milliseconds, None of nothing."""
    whole = [answer for answer in run.answers if answer.error is None]
    prompt_tokens, output_tokens = sum(a.prompt_tokens for a in whole), sum(a.output_tokens for a in whole)
    good = sum(is_good(answer, goodput) for answer in run.answers)
    per_second = 1 / run.duration if run.duration else 0.0
    found: dict[str, Any] = {
        "duration": run.duration,
        "completed": len(whole),
        "failed": len(run.answers) - len(whole),
        "total_input_tokens": prompt_tokens,
        "total_cached_tokens": sum(a.cached_tokens for a in whole),
        "total_output_tokens": output_tokens,
        "request_throughput": len(whole) * per_second,
        "request_goodput": good * per_second if goodput else None,
        "good_share": good / len(run.answers) if goodput and run.answers else None,
        "output_throughput": output_tokens * per_second,
        "total_token_throughput": (prompt_tokens + output_tokens) * per_second,
        "max_output_tokens_per_s": float(max(tokens_by_second(whole, run.began), default=0.0)),
        "peak_concurrent_requests": peak_concurrency(run.answers),
    }
    samples = seconds_of(whole)
    for metric in metrics:
        found |= summary(metric, samples[metric], percentiles)
    return found | _probe_figures(run.probes)


def seconds_of(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """The samples of each metric."""
    return {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [tpot for answer in answers if (tpot := answer.tpot) is not None],
        "itl": [gap for answer in answers for gap in answer.itl],
        "e2el": [answer.e2el for answer in answers],
        "client_queue_time": [max(0.0, answer.started - answer.intended) for answer in answers],
    }


def summary(metric: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """In milliseconds."""
    found = {
        name: float(figure(seconds)) * 1e3 if seconds else None for name, figure in kinds(metric, percentiles).items()
    }
    return {**found, f"std_{metric}_ms": float(np.std(seconds)) * 1e3 if seconds else None}


def kinds(metric: str, percentiles: Sequence[float]) -> dict[str, Figure]:
    """The figures of a latency, by their names."""
    named: dict[str, Figure] = {f"mean_{metric}_ms": np.mean, f"median_{metric}_ms": np.median}
    return named | {percentile_name(p, metric): percentile(p) for p in percentiles}


def percentile_name(rank: float, metric: str) -> str:
    return f"p{rank:g}_{metric}_ms"


def wrong_figures(
    run: Run, found: Mapping[str, Any], percentiles: Sequence[float], metrics: Sequence[str]
) -> dict[str, str]:
    """The figures that are the client's, and why."""
    health, reasons = run.health, {}
    for metric in metrics:
        for name, figure in kinds(metric, percentiles).items():
            if found[name] is not None and (why := health.why_wrong(metric, figure, found[name] / 1e3)):
                reasons[name] = reasons[f"std_{metric}_ms"] = why
    whole = [answer.e2el for answer in run.answers if answer.error is None]
    late = health.why_wrong("e2el", np.mean, float(np.mean(whole))) if whole else None
    if why := health.why_too_busy or late:
        reasons |= dict.fromkeys(THROUGHPUTS, why)
    if (why := health.why_too_busy) and "tpot" in metrics:
        reasons |= dict.fromkeys([*kinds("tpot", percentiles), "std_tpot_ms"], why)
    return reasons


def is_good(answer: Answer, goodput: Goodput) -> bool:
    """Whole, and within every limit; an answer of one token has no time per token to be too slow."""
    if answer.error is not None:
        return False
    values = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.e2el}
    return all(values[name] * 1e3 <= limit for name, limit in goodput.items())


def tokens_by_second(answers: Sequence[Answer], began: float) -> list[float]:
    """Output tokens in each second of a run. The tokens of an answer are shared evenly among its events."""
    times = [time - began for answer in answers for time in answer.token_times]
    weights = [a.output_tokens / len(a.token_times) for a in answers for _ in a.token_times]
    return list(map(float, np.bincount([int(time) for time in times], weights))) if times else []


def concurrency(answers: Sequence[Answer], began: float) -> list[tuple[float, int]]:
    """Steps of the number of requests under way: the time in the run, and the number from then on."""
    ups = [(answer.started - began, 1) for answer in answers]
    steps, level = [], 0
    # at equal times ends come first: a user who asks again is one request
    for time, change in sorted(ups + [(answer.end - began, -1) for answer in answers]):
        level += change
        steps.append((time, level))
    return steps


def peak_concurrency(answers: Sequence[Answer]) -> int:
    return max((level for _, level in concurrency(answers, 0.0)), default=0)


def errors_of(answers: Sequence[Answer]) -> dict[str, int]:
    """How often each message came, the most frequent first."""
    counts: dict[str, int] = {}
    for answer in answers:
        if answer.error is not None:
            counts[answer.error] = counts.get(answer.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def details(run: Run) -> dict[str, Any]:
    """Each answer, as vLLM's --save-detailed has them: seconds, zeros and empty lists where a request failed."""
    answers = sorted(run.answers, key=lambda answer: answer.intended)
    failed = [answer.error is not None for answer in answers]
    return {
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "ttfts": [0.0 if bad else answer.ttft for answer, bad in zip(answers, failed, strict=True)],
        "itls": [[] if bad else answer.itl for answer, bad in zip(answers, failed, strict=True)],
        "latencies": [0.0 if bad else answer.e2el for answer, bad in zip(answers, failed, strict=True)],
        "start_times": [answer.intended for answer in answers],
        "queue_times": [max(0.0, answer.started - answer.intended) for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


def _probe_figures(probes: Sequence[Answer]) -> dict[str, Any]:
    if not probes:
        return {}
    ms = [answer.e2el * 1e3 for answer in probes if answer.error is None]
    return {
        "probe_completed": len(ms),
        "probe_failed": len(probes) - len(ms),
        "probe_median_e2el_ms": float(np.median(ms)) if ms else None,
        "probe_p99_e2el_ms": float(np.percentile(ms, 99)) if ms else None,
        "probe_max_e2el_ms": max(ms, default=None),
    }
