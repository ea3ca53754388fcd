"""95 % confidence intervals of means over repeats, by Student's t distribution."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The quantile 0.975 for 1, 2, … degrees of freedom; beyond them the last is a little too wide."""


class Interval(NamedTuple):
    low: float
    high: float


def half_width(values: Sequence[float]) -> float:
    """Of the interval around the mean; at least two values."""
    freedom = len(values) - 1
    return T_975[min(freedom, len(T_975)) - 1] * stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float]) -> Interval | None:
    """None for a single value: it says nothing of its spread."""
    if len(values) < 2:
        return None
    return Interval(mean(values) - half_width(values), mean(values) + half_width(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval | None]:
    """Geometric mean of the pairs' ratios theirs / ours, and its interval: pairs share the machine's state."""
    logs = [math.log(b / a) for a, b in zip(ours, theirs, strict=True)]
    around = interval(logs)
    return math.exp(mean(logs)), around and Interval(math.exp(around.low), math.exp(around.high))
