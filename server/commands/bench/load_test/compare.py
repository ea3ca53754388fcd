"""Two servers in turn: A B, B A, A B, … so that what drifts meets both alike. Ratios are taken pair by pair."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from .confidence import ratio
from .driver import Run
from .measure import percentile_name
from .names import METRICS
from .trial import Bench, Trial

RATE_NAMES = {
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output throughput (tok/s)",
    "total_token_throughput": "Total throughput (tok/s)",
}
WIDTHS = (34, 12, 12, 9)


async def alternate(benches: Sequence[Bench], rate: float, repeats: int) -> list[Trial]:
    """A trial of `repeats` runs per server; after Ctrl-C of those pairs that were whole, or of what there is."""
    trials = [Trial(rate, [], []) for _ in benches]
    for number in range(repeats):
        order = list(zip(benches, trials, strict=True))
        pair: list[tuple[Trial, Run, dict[str, Any]]] = []
        for bench, trial in order[:: -1 if number % 2 else 1]:
            run = await bench.run(rate, number)
            pair.append((trial, run, bench.measured(run)))
            if run.interrupted:
                break
        interrupted = pair[-1][1].interrupted
        if number == 0 or not interrupted:
            for trial, run, figures in pair:
                trial.runs.append(run)
                trial.figures.append(figures)
        if interrupted:
            trials[0].runs[-1].interrupted = True
            break
    return trials


def ratios(trials: Sequence[Trial], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each figure that both servers have in every run: B / A and its 95 % confidence interval."""
    found = {}
    for name in labels(arguments):
        ours, theirs = ([figures.get(name) for figures in trial.figures] for trial in trials)
        if all(ours) and all(theirs):
            value, around = ratio([each for each in ours if each], [each for each in theirs if each])
            found[name] = {"ratio": value, "confidence_95": None if around is None else list(around)}
    return found


def labels(arguments: argparse.Namespace) -> dict[str, str]:
    """The figures that are compared."""
    names = {name: label for name, label in RATE_NAMES.items() if name != "request_goodput" or arguments.goodput}
    for metric in arguments.percentile_metrics:
        kinds = {f"mean_{metric}_ms": "Mean", f"median_{metric}_ms": "Median"}
        kinds |= {percentile_name(p, metric): f"P{p:g}" for p in arguments.metric_percentiles}
        names |= {name: f"{kind} {METRICS[metric][0]} (ms)" for name, kind in kinds.items()}
    return names


def table(trials: Sequence[Trial], found: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace) -> list[str]:
    lines = [_row("", "A", "B", "B / A") + "   95 % confidence"]
    combined = [trial.combined for trial in trials]
    for name, label in labels(arguments).items():
        cells = ["-" if each.get(name) is None else f"{each[name]:.2f}" for each in combined]
        if name not in found:
            lines.append(_row(label, *cells, "-"))
            continue
        around = found[name]["confidence_95"]
        interval = "" if around is None else f"   {around[0]:.3f} to {around[1]:.3f}"
        lines.append(_row(label, *cells, f"{found[name]['ratio']:.3f}") + interval)
    return lines


def _row(label: str, *cells: str) -> str:
    return label.ljust(WIDTHS[0]) + "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS[1:], strict=True))
