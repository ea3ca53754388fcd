"""Whether the client was the bottleneck.

A load test is wrong where its client is late: tokens that waited to be read look like slow tokens, and requests that
were sent late are not the load that was asked for. Three things are watched: how late the event loop runs a timer, how
late requests begin against the time they were due, and the share of a core that the client uses.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

TICK = 0.005
MAX_CPU_SHARE = 0.9
"""Of the one core that the client can use. Beyond it, throughput may be the client's."""
MAX_SHARE_OF_FIGURE = 0.1
"""A latency is wrong when the same figure of the client's lateness, P99 for P99, is more than this share of it."""
CLOCK_STEP = 0.002
"""Timers of an event loop have steps of a millisecond: less lateness than two of them says nothing."""

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
        if self.cpu_share <= MAX_CPU_SHARE:
            return None
        return f"the client used {self.cpu_share:.0%} of the one core that it can use"

    def why_wrong(self, metric: str, figure: Figure, value: float) -> str | None:
        """Why a latency of `value` seconds says more of the client than of the server; None when it does not.

        A first token and an end are late by what their sending and their reading were late; what lies between two
        tokens only by the latter; an average over many tokens only suffers from a client without a break.
        """
        if metric == "tpot":
            return self.why_too_busy
        lateness = _of(figure, self.loop_lags) + (0.0 if metric == "itl" else _of(figure, self.late_sends))
        if lateness <= max(CLOCK_STEP, MAX_SHARE_OF_FIGURE * value):
            return None
        return f"the client was {lateness * 1e3:.1f} ms late"

    def as_json(self) -> dict[str, float]:
        found = {"cpu_share": round(self.cpu_share, 3)}
        for what, values in {"loop_lag": self.loop_lags, "late_send": self.late_sends}.items():
            found[f"mean_{what}_ms"] = round(_of(np.mean, values) * 1e3, 3)
            found[f"p99_{what}_ms"] = round(_of(percentile(99), values) * 1e3, 3)
        return found


def _of(figure: Figure, values: Sequence[float]) -> float:
    return float(figure(values)) if values else 0.0
