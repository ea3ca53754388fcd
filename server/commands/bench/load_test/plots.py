"""Plots as inline SVG, coloured by the page's CSS variables, so that they follow its light or dark scheme."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 640, 16, 272  # of the plotting area
NUM_TICKS = 6

Point = tuple[float, float]


class Line(NamedTuple):
    name: str
    points: Sequence[Point]
    dashed: bool = False
    """Without dots, for limits."""


def line_plot(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, log_y: bool = False) -> str:
    """Nothing for no points."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    to_x = _scale(_ticks(min(x for x, _ in points), max(x for x, _ in points)), LEFT, RIGHT)
    ys = _decades([y for _, y in points]) if log_y else _ticks(0, max(y for _, y in points))
    to_y = _scale(ys, BOTTOM, TOP, log=log_y)
    xs = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    parts = _axes([(to_x(x), f"{x:g}") for x in xs], [(to_y(y), f"{y:g}") for y in ys], x_label, y_label)
    ends = sorted((to_y(line.points[-1][1]), index) for index, line in enumerate(lines) if line.points)
    labels = dict(zip((index for _, index in ends), _apart([y for y, _ in ends]), strict=True))
    for index, line in enumerate(lines):
        if not line.points:
            continue
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line.points)
        dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<polyline class="c{index % 6}" points="{path}"{dashes}/>')
        if not line.dashed and len(line.points) <= 60:
            parts += [_dot(to_x(x), to_y(y), index, f"{line.name}: {y:.4g} at {x:.4g}") for x, y in line.points]
        parts.append(
            f'<text class="t{index % 6}" x="{RIGHT + 8}" y="{labels[index] + 4:.1f}">{escape(line.name)}</text>'
        )
    return _figure(title, parts)


def timeline(title: str, rows: Sequence[tuple[float, float, float, float, bool]]) -> str:
    """One row per request: intended, started, first token and end in seconds, and whether it failed."""
    if not rows:
        return ""
    ticks = _ticks(0, max(end for *_, end, _ in rows))
    to_x = _scale(ticks, LEFT, RIGHT)
    height = min(12.0, (BOTTOM - TOP) / len(rows))
    parts = _axes([(to_x(x), f"{x:g}") for x in ticks], [], "seconds", "requests")
    for index, (intended, started, first, end, failed) in enumerate(rows):
        y = TOP + index * (BOTTOM - TOP) / len(rows)
        spans = [("wait", intended, started), ("first", started, first), ("rest", first, end)]
        told = f"request {index + 1}: {'failed' if failed else 'answered'} after {end - intended:.3f} s"
        boxes = [
            f'<rect class="{"failed" if failed else kind}" x="{to_x(a):.2f}" y="{y:.2f}" '
            f'width="{max(0.3, to_x(b) - to_x(a)):.2f}" height="{height:.2f}"/>'
            for kind, a, b in spans
            if b > a
        ]
        parts.append(f"<g><title>{told}</title>{''.join(boxes)}</g>")
    for index, (kind, name) in enumerate(
        [("wait", "client queue"), ("first", "to first token"), ("rest", "tokens"), ("failed", "failed")]
    ):
        y = TOP + 20 * index
        parts.append(f'<rect class="{kind}" x="{RIGHT + 8}" y="{y}" width="12" height="12"/>')
        parts.append(f'<text x="{RIGHT + 26}" y="{y + 10}">{name}</text>')
    return _figure(title, parts)


def _figure(title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label={quoteattr(title)}>'
    return "\n".join([f"<figure><figcaption>{escape(title)}</figcaption>", head, *parts, "</svg></figure>"])


def _axes(xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]], x_label: str, y_label: str) -> list[str]:
    parts = []
    for x, text in xs:
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{text}</text>')
    for y, text in ys:
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    middle = (TOP + BOTTOM) / 2
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
    )
    return parts


def _dot(x: float, y: float, index: int, told: str) -> str:
    return f'<circle class="c{index % 6}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(told)}</title></circle>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around both ends, at least two."""
    span = high - low
    if span <= 1e-6 * max(abs(high), 1e-3):  # too narrow for ticks of its own
        span = max(abs(high), 1e-6)
    step = 10 ** math.floor(math.log10(span / NUM_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= NUM_TICKS)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    """1, 2, 5, 10, …: from the last at most the least positive value to the first at least the greatest."""
    low = max(min((value for value in values if value > 0), default=1.0), 1e-9)
    steps = [factor * 10.0**power for power in range(-9, 10) for factor in (1, 2, 5)]
    first = max(index for index, step in enumerate(steps) if step <= low)
    last = next(index for index, step in enumerate(steps) if step >= max(*values, low) and index > first)
    return steps[first : last + 1]


def _scale(ticks: Sequence[float], begin: float, end: float, *, log: bool = False) -> Callable[[float], float]:
    """From the first tick -> begin to the last -> end; what a logarithm cannot show lies at the beginning."""
    place = (lambda value: math.log(max(value, ticks[0]))) if log else float
    low, high = place(ticks[0]), place(ticks[-1])
    return lambda value: begin + (end - begin) * (place(value) - low) / (high - low)


def _apart(ys: Sequence[float], distance: float = 15) -> list[float]:
    """Ascending positions moved down so far that no two labels overlap."""
    placed: list[float] = []
    for y in ys:
        placed.append(max(y, placed[-1] + distance) if placed else y)
    return placed
