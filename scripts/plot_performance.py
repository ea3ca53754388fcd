"""Two plots of what a token costs, from the last line of `octavo bench latency`:

    octavo bench latency smollm2 --batch-sizes 1,2,4,8,16,32,64 --input-lens 128,512,1024 > latency.txt
    python scripts/plot_performance.py latency.txt docs

writes docs/cost-by-batch-size.svg and docs/cost-by-context.svg. Both axes are logarithmic.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 520, 40, 350  # of the plotting area
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5a9e", "#c98a00", "#4a4a4a", "#00838f")

Point = tuple[float, float]
Lines = dict[str, list[Point]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="output of `octavo bench latency`")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs"), help="where the plots go (default: docs)")
    arguments = parser.parse_args()
    report = json.loads(arguments.file.read_text(encoding="utf-8").splitlines()[-1])
    assert report["benchmark"] == "latency", report["benchmark"]
    where = f"{report['hardware']['processor']}, {report['num_threads']} threads, {report['dtype']}"
    for name, axis, x, series, label in (
        ("cost-by-batch-size", "requests that decode together", "batch_size", "input_len", "{} tokens of context"),
        ("cost-by-context", "tokens of context", "input_len", "batch_size", "batch {}"),
    ):
        svg = plot(lines_of(report["results"], x, series, label), axis, f"Milliseconds per generated token ({where})")
        (arguments.folder / f"{name}.svg").write_text(svg, encoding="utf-8")


def lines_of(results: list[dict[str, float]], x: str, series: str, label: str) -> Lines:
    """One line per value of `series`: the time per token of a step, shared among its rows, against `x`."""
    lines: Lines = {}
    for result in sorted(results, key=lambda result: (result[series], result[x])):
        point = (result[x], result["tpot_ms"] / result["batch_size"])
        lines.setdefault(label.format(result[series]), []).append(point)
    return lines


def plot(lines: Lines, axis: str, title: str) -> str:
    points = [point for line in lines.values() for point in line]
    xs = sorted({x for x, _ in points})
    ys = ticks(min(y for _, y in points), max(y for _, y in points))
    to_x, to_y = scale(xs[0], xs[-1], LEFT, RIGHT), scale(ys[0], ys[-1], BOTTOM, TOP)
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', text(LEFT, TOP - 16, title, "start")]
    for x in xs:
        parts += [segment(to_x(x), TOP, to_x(x), BOTTOM), text(to_x(x), BOTTOM + 18, f"{x:g}", "middle")]
    for y in ys:
        parts += [segment(LEFT, to_y(y), RIGHT, to_y(y)), text(LEFT - 8, to_y(y) + 4, f"{y:g}", "end")]
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 38, axis, "middle"))
    ends = sorted((to_y(line[-1][1]), name) for name, line in lines.items())
    label_y = dict(zip((name for _, name in ends), apart([y for y, _ in ends]), strict=True))
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        parts.append(text(RIGHT + 8, label_y[name] + 4, name, "start", colour))
    attributes = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>', *parts, "</svg>", ""])


def ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, …: from the last at most `low` to the first at least `high`."""
    steps = [m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5)]
    first = max(index for index, step in enumerate(steps) if step <= low)
    last = min(index for index, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """Logarithmic, from low -> begin to high -> end; a single value lies in the middle."""
    if low == high:
        return lambda _: (begin + end) / 2
    return lambda value: begin + (end - begin) * math.log(value / low) / math.log(high / low)


def apart(ys: list[float], distance: float = 14) -> list[float]:
    """Ascending positions moved down so far that no two labels overlap."""
    placed: list[float] = []
    for y in ys:
        placed.append(max(y, placed[-1] + distance) if placed else y)
    return placed


def segment(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def text(x: float, y: float, content: str, anchor: str, colour: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(content)}</text>'


if __name__ == "__main__":
    main()
