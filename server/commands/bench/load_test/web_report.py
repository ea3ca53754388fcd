"""One HTML file without outside assets: latency by rate, percentiles, timeline, and the figures."""

import argparse
import math
from collections.abc import Sequence
from statistics import median
from xml.sax.saxutils import escape

import numpy as np

from .answer import Answer
from .driver import Run
from .measure import concurrency, seconds_of, tokens_by_second
from .names import METRICS
from .plots import Line, line_plot, timeline
from .report import block
from .trial import Trial

MAX_ROWS = 400
"""Of the timeline."""
NUM_GROUPS = 12
PERCENTILES = [*range(1, 100), 99.5, 99.9]

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --grid: #d8dee4; --c0: #1b6ca8; --c1: #c2410c;
  --c2: #2e7d32; --c3: #7b4fa3; --c4: #a16207; --c5: #0e7490; --bad: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --grid: #30363d; --c0: #6cb6ff;
  --c1: #ff9a5c; --c2: #6fdd8b; --c3: #d2a8ff; --c4: #e3b341; --c5: #56d4dd; --bad: #ff7b72; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
figure { margin: 2rem 0; } figcaption { font-weight: 600; } pre { overflow-x: auto; } .bad { color: var(--bad); }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); } svg line { stroke: var(--grid); }
polyline { fill: none; stroke-width: 2; } rect.wait { fill: var(--c4); } rect.first { fill: var(--c1); }
rect.rest { fill: var(--c0); } rect.failed { fill: var(--bad); }
"""
COLOURS = "".join(
    f"polyline.c{i} {{ stroke: var(--c{i}); }} circle.c{i}, svg text.t{i} {{ fill: var(--c{i}); }}\n" for i in range(6)
)


def page(title: str, trials: Sequence[tuple[str, Trial]], arguments: argparse.Namespace, text: str = "") -> str:
    """A well-formed document. Each trial has a name; `text`: lines that stand before the plots."""
    parts = [f"<h1>{escape(title)}</h1>"]
    if wrong := [name for name, trial in trials if trial.is_wrong]:
        names = escape(", ".join(wrong))
        parts.append(f'<p class="bad">The client was the bottleneck ({names}): see the figures below.</p>')
    if text:
        parts.append(f"<pre>{escape(text)}</pre>")
    parts.append(_latency_by_rate(trials, arguments))
    for name, trial in trials:
        parts += _plots_of_one(name if len(trials) > 1 else "", trial)
        parts.append(f"<h2>{escape(name)}</h2><pre>{escape(chr(10).join(block(trial, arguments)))}</pre>")
    head = f'<head><meta charset="utf-8"/><title>{escape(title)}</title><style>{STYLE}{COLOURS}</style></head>'
    body = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en">{head}<body>\n{body}\n</body></html>\n'


def _latency_by_rate(trials: Sequence[tuple[str, Trial]], arguments: argparse.Namespace) -> str:
    """A point per trial; of a single one, a point per group of requests that followed each other."""
    points = [(_offered(trial), _whole(trial.answers)) for _, trial in trials]
    title = "Latency by rate"
    if len(points) == 1:
        groups = [group for run in trials[0][1].runs for group in _consecutive(_whole(run.answers))]
        points = [(_arrival_rate(group), group) for group in groups]
        title = "Latency by rate within the run, in groups of requests that followed each other"
    points = sorted(((rate, group) for rate, group in points if rate and group), key=lambda point: point[0])
    lines = []
    for metric in ("e2el", "ttft"):
        for what, percentile in (("median", 50), ("P99", 99)):
            values = [(rate, _percentile(group, metric, percentile)) for rate, group in points]
            lines.append(Line(f"{what} {METRICS[metric][0]}", values))
    if points:
        ends = (points[0][0], points[-1][0])
        for name, limit in arguments.goodput.items():
            if name in ("ttft", "e2el"):
                lines.append(Line(f"limit of {METRICS[name][0]}", [(x, limit) for x in ends], dashed=True))
    return line_plot(title, "requests per second", "milliseconds", lines, log_y=True)


def _plots_of_one(name: str, trial: Trial) -> list[str]:
    suffix = f", {name}" if name else ""
    samples = seconds_of(_whole(trial.answers))
    lines = [
        Line(METRICS[metric][0], [(p, float(np.percentile(values, p)) * 1e3) for p in PERCENTILES])
        for metric in ("e2el", "ttft", "tpot", "itl")
        if (values := samples[metric])
    ]
    run = trial.runs[0]
    return [
        line_plot(f"Percentiles{suffix}", "percentile", "milliseconds", lines, log_y=True),
        timeline(f"Timeline{suffix}", _rows(run)),
        _flow(f"Requests under way, and output tokens per second{suffix}", run),
    ]


def _rows(run: Run) -> list[tuple[float, float, float, float, bool]]:
    """Evenly picked when there are too many."""
    answers = sorted(run.answers, key=lambda answer: answer.intended)
    step = -(-len(answers) // MAX_ROWS) or 1
    rows = []
    for answer in answers[::step]:
        first = answer.token_times[0] if answer.token_times else answer.end
        times = (answer.intended, answer.started, first, answer.end)
        a, b, c, d = (max(0.0, time - run.began) for time in times)
        rows.append((a, b, c, d, answer.error is not None))
    return rows


def _flow(title: str, run: Run) -> str:
    """Both as shares of their peaks, which their names tell."""
    whole = _whole(run.answers)
    tokens = tokens_by_second(whole, run.began)
    steps = concurrency(run.answers, run.began)
    if not tokens or not steps:
        return ""
    peak_tokens, peak_level = max(tokens), max(level for _, level in steps)
    per_second = [(second + 0.5, 100 * count / peak_tokens) for second, count in enumerate(tokens)]
    lines = [
        Line(f"requests, peak {peak_level}", [(time, 100 * level / peak_level) for time, level in _stairs(steps)]),
        Line(f"tokens/s, peak {peak_tokens:.0f}", per_second),
    ]
    return line_plot(title, "seconds", "% of the peak", lines)


def _stairs(steps: Sequence[tuple[float, int]], most: int = 500) -> list[tuple[float, int]]:
    """The corners of a step function, of evenly picked steps when there are too many."""
    picked = steps[:: -(-len(steps) // most)]
    corners = [picked[0]]
    for time, level in picked[1:]:
        corners += [(time, corners[-1][1]), (time, level)]
    return corners


def _whole(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.error is None]


def _consecutive(answers: Sequence[Answer]) -> list[list[Answer]]:
    ordered = sorted(answers, key=lambda answer: answer.intended)
    size = max(2, -(-len(ordered) // NUM_GROUPS))
    return [ordered[begin : begin + size] for begin in range(0, len(ordered), size)]


def _offered(trial: Trial) -> float:
    """Requests per second; what came of it in a closed loop."""
    seconds = sum(run.duration for run in trial.runs)
    return trial.rate if math.isfinite(trial.rate) else len(trial.answers) / seconds if seconds else 0.0


def _arrival_rate(answers: Sequence[Answer]) -> float:
    """0 when there is no telling."""
    times = sorted(answer.intended for answer in answers)
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0


def _percentile(answers: Sequence[Answer], metric: str, percentile: float) -> float:
    values = seconds_of(answers)[metric]
    return float(median(values) if percentile == 50 else np.percentile(values, percentile)) * 1e3
