"""One HTML file without outside assets: latency by rate, percentiles, timeline, and the figures.

Plots are inline SVG, coloured by the page's CSS variables, so that they follow its light or dark scheme.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from .flags import METRICS
from .measure import Run, Trial, by_due, concurrency, samples, tokens_by_second, whole

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 600, 16, 272
"""The plotting area; the legend stands to its right."""
NUM_TICKS = 6
MAX_ROWS = 400
"""Requests in the timeline."""
NUM_GROUPS = 12
PERCENTILES = [*range(1, 100), 99.5, 99.9]

STYLE = Path(__file__).with_suffix(".css")


class Line(NamedTuple):
    """A line of a plot; those of limits are dashed, without dots."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def page(title: str, text: str, trials: Sequence[Trial], blocks: Sequence[str], goodput: Mapping[str, float]) -> str:
    """A well-formed document. `text`: lines that stand before the plots; `blocks`: the figures of each trial."""
    parts = [f"<h1>{escape(title)}</h1>"]
    if wrong := [trial.name for trial in trials if trial.figures["client"]["bottleneck"]]:
        names = escape(", ".join(wrong))
        parts.append(f'<p class="bad">The client was the bottleneck ({names}): see the figures below.</p>')
    parts += [f"<pre>{escape(text)}</pre>" if text else "", _latency_by_rate(trials, goodput)]
    for trial, block in zip(trials, blocks, strict=True):
        suffix = f", {trial.name}" if len(trials) > 1 else ""
        run = trial.runs[0]
        parts += [_percentiles(f"Percentiles{suffix}", trial), _timeline(f"Timeline{suffix}", run)]
        parts.append(_flow(f"Requests under way, and output tokens per second{suffix}", run))
        parts.append(f"<h2>{escape(trial.name)}</h2><pre>{escape(block)}</pre>")
    head = f'<head><meta charset="utf-8"/><title>{escape(title)}</title><style>{STYLE.read_text()}</style></head>'
    body = "\n".join(filter(None, parts))
    return f'<!DOCTYPE html>\n<html lang="en">{head}<body>\n{body}\n</body></html>\n'


def _latency_by_rate(trials: Sequence[Trial], goodput: Mapping[str, float]) -> str:
    """A point per trial; of a single one, a point per group of requests that followed each other."""
    title, points = "Latency by rate", []
    if len(trials) > 1:
        for trial in trials:
            seconds = sum(run.duration for run in trial.runs)
            rate = trial.rate if math.isfinite(trial.rate) else len(trial.responses) / seconds
            points.append((rate, whole(trial.responses)))
    else:
        title += " within the run, in groups of requests that followed each other"
        for run in trials[0].runs:
            ordered = by_due(whole(run.responses))
            size = max(2, -(-len(ordered) // NUM_GROUPS))
            for group in (ordered[begin : begin + size] for begin in range(0, len(ordered), size)):
                if group[-1].due > group[0].due:
                    points.append(((len(group) - 1) / (group[-1].due - group[0].due), group))
    points = sorted((point for point in points if point[1]), key=lambda point: point[0])
    lines = [
        Line(f"{what} {METRICS[metric][0]}", [(x, _ms(samples(group, metric), rank)) for x, group in points])
        for metric in ("e2el", "ttft")
        for what, rank in (("median", 50), ("P99", 99))
    ]
    for name in (name for name in goodput if name != "tpot"):
        ends = [(x, goodput[name]) for x, _ in points[:1] + points[-1:]]
        lines.append(Line(f"limit of {METRICS[name][0]}", ends, dashed=True))
    return _line_plot(title, "requests per second", "milliseconds", lines, log_y=True)


def _ms(seconds: Sequence[float], rank: float) -> float:
    return float(np.percentile(seconds, rank)) * 1e3


def _percentiles(title: str, trial: Trial) -> str:
    lines = [
        Line(METRICS[metric][0], [(rank, _ms(values, rank)) for rank in PERCENTILES])
        for metric in ("e2el", "ttft", "tpot", "itl")
        if (values := samples(whole(trial.responses), metric))
    ]
    return _line_plot(title, "percentile", "milliseconds", lines, log_y=True)


def _flow(title: str, run: Run) -> str:
    """Both as shares of their peaks, which their names tell."""
    tokens = tokens_by_second(whole(run.responses), run.began)
    steps = concurrency(run.responses, run.began)
    if not tokens:
        return ""
    peak_tokens, peak_level = max(tokens), max(level for _, level in steps)
    picked = steps[:: -(-len(steps) // 500)]
    befores = [0, *(level for _, level in picked)]
    stairs = [(x, level) for (x, after), before in zip(picked, befores, strict=False) for level in (before, after)]
    lines = [
        Line(f"requests, peak {peak_level}", [(time, 100 * level / peak_level) for time, level in stairs]),
        Line(f"tokens/s, peak {peak_tokens:.0f}", [(s + 0.5, 100 * n / peak_tokens) for s, n in enumerate(tokens)]),
    ]
    return _line_plot(title, "seconds", "% of the peak", lines)


def _timeline(title: str, run: Run) -> str:
    """A row per request, evenly picked when there are too many."""
    ordered = by_due(run.responses)[:: -(-len(run.responses) // MAX_ROWS) or 1]
    if not ordered:
        return ""
    to_x, parts = _axis(_ticks([0.0, *(response.end - run.began for response in ordered)]), "seconds")
    parts.append(_text(14, (TOP + BOTTOM) / 2, "requests", "middle", -90))
    height = (BOTTOM - TOP) / len(ordered)
    for index, response in enumerate(ordered):
        first = response.token_times[0] if response.token_times else response.end
        xs = [to_x(max(0.0, time - run.began)) for time in (response.due, response.started, first, response.end)]
        boxes = [
            f'<rect style="fill: var(--{"bad" if response.error else colour})" x="{begin:.2f}" '
            f'y="{TOP + index * height:.2f}" width="{max(0.3, end - begin):.2f}" height="{min(12.0, height):.2f}"/>'
            for colour, begin, end in zip(("c4", "c1", "c0"), xs, xs[1:], strict=False)
            if end > begin
        ]
        how = "failed" if response.error else "answered"
        seconds = response.end - response.due
        parts.append(f"<g><title>request {index + 1}: {how} after {seconds:.3f} s</title>{''.join(boxes)}</g>")
    legend = {"client queue": "c4", "to first token": "c1", "tokens": "c0", "failed": "bad"}
    return _figure(title, parts, legend)


def _line_plot(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, log_y: bool = False) -> str:
    """Nothing for no points."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs, ys = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    to_x, parts = _axis(_ticks(xs), x_label)
    to_y, others = _axis(_decades(ys) if log_y else _ticks([0.0, *ys]), y_label, vertical=True, log=log_y)
    parts += others
    for index, line in enumerate(lines):
        style = f"stroke: var(--c{index % 6})" + ("; stroke-dasharray: 5 4" if line.dashed else "")
        points = [(f"{to_x(x):.1f}", f"{to_y(y):.1f}", f"{line.name}: {y:.4g} at {x:.4g}") for x, y in line.points]
        parts.append(f'<polyline style="{style}" points="{" ".join(f"{x},{y}" for x, y, _ in points)}"/>')
        if not line.dashed and len(points) <= 60:
            dot = f'<circle style="fill: var(--c{index % 6})" r="3"'
            parts += [f'{dot} cx="{x}" cy="{y}"><title>{escape(text)}</title></circle>' for x, y, text in points]
    return _figure(title, parts, {line.name: f"c{index % 6}" for index, line in enumerate(lines)})


def _figure(title: str, parts: list[str], legend: Mapping[str, str]) -> str:
    """`legend`: the variables that hold the colours of what is shown."""
    for index, (name, colour) in enumerate(legend.items()):
        y = TOP + 20 * index
        parts.append(f'<rect style="fill: var(--{colour})" x="{RIGHT + 8}" y="{y}" width="12" height="12"/>')
        parts.append(_text(RIGHT + 26, y + 10, name))
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label={quoteattr(title)}>'
    return "\n".join([f"<figure><figcaption>{escape(title)}</figcaption>", head, *parts, "</svg></figure>"])


def _text(x: float, y: float, text: str, anchor: str = "start", angle: int = 0) -> str:
    turn = f' transform="rotate({angle} {x} {y})"' if angle else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _axis(
    ticks: Sequence[float], label: str, *, vertical: bool = False, log: bool = False
) -> tuple[Callable[[float], float], list[str]]:
    """From values to pixels, and the grid. What a logarithm cannot show lies at the beginning."""
    begin, end = (BOTTOM, TOP) if vertical else (LEFT, RIGHT)
    place = (lambda value: math.log(max(value, ticks[0]))) if log else float

    def scale(value: float) -> float:
        return float(np.interp(place(value), [place(ticks[0]), place(ticks[-1])], [begin, end]))

    middle = (begin + end) / 2
    parts = [_text(14, middle, label, "middle", -90) if vertical else _text(middle, BOTTOM + 38, label, "middle")]
    for tick in ticks:
        at = scale(tick)
        x1, y1, x2, y2 = (LEFT, at, RIGHT, at) if vertical else (at, TOP, at, BOTTOM)
        x, y, anchor = (LEFT - 8, at + 4, "end") if vertical else (at, BOTTOM + 18, "middle")
        parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        parts.append(_text(x, y, f"{tick:g}", anchor))
    return scale, parts


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers around all values, at least two."""
    low, high = min(values), max(values)
    span = high - low
    if span <= 1e-6 * max(abs(high), 1e-3):  # too narrow for ticks of its own
        span = max(abs(high), 1e-6)
    step = 10 ** math.floor(math.log10(span / NUM_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= NUM_TICKS)
    first = math.floor(low / step)
    return [round(index * step, 10) for index in range(first, max(math.ceil(high / step), first + 1) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    """1, 2, 5, 10, …: from the last at most the least positive value to the first at least the greatest."""
    steps = [factor * 10.0**power for power in range(-9, 10) for factor in (1, 2, 5)]
    first = bisect_right(steps, min((value for value in values if value > steps[0]), default=1.0)) - 1
    return steps[first : max(first + 1, bisect_left(steps, max(values))) + 1]
