"""When requests are meant to be sent: seconds after the start of a run.

The intervals of an open loop come from a gamma distribution of mean 1 / rate and shape `burstiness`: 1 is a Poisson
process, less is burstier, infinity is a metronome. The variance of an interval is (1 / rate)² / burstiness.
"""

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

Strategy = Literal["linear", "exponential"]


class Ramp(NamedTuple):
    """From the rate of the first request to that of the last, in requests per second."""

    strategy: Strategy
    start: float
    end: float

    def rates(self, count: int) -> list[float]:
        """One for each request: evenly spaced (linear), or each a fixed multiple of the one before (exponential)."""
        shares = [index / max(1, count - 1) for index in range(count)]
        if self.strategy == "linear":
            return [self.start + (self.end - self.start) * share for share in shares]
        return [self.start * (self.end / self.start) ** share for share in shares]


def steady(count: int, rate: float, burstiness: float, draw: random.Random) -> list[float]:
    """Ascending; the last is exactly `count / rate`, so that every draw offers the same load."""
    times = _arrivals([rate] * count, burstiness, draw)
    return [time * count / rate / times[-1] for time in times]


def ramped(count: int, ramp: Ramp, burstiness: float, draw: random.Random) -> list[float]:
    """Ascending, at rates that grow from one request to the next."""
    return _arrivals(ramp.rates(count), burstiness, draw)


def _arrivals(rates: Sequence[float], burstiness: float, draw: random.Random) -> list[float]:
    if math.isinf(burstiness):
        return list(accumulate(1 / rate for rate in rates))
    return list(accumulate(draw.gammavariate(burstiness, 1 / (rate * burstiness)) for rate in rates))
