"""Whether the client was the bottleneck.

A load test is wrong where its client is late: tokens that waited to be read look like slow tokens, and requests that
were sent late are not the load that was asked for. Three things are watched: how late the event loop runs a timer, how
late requests begin against their intended times, and the share of a core that the client uses.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

TICK = 0.005
MAX_CPU_SHARE = 0.9
"""Of the one core that the client can use. Beyond it, throughput may be the client's."""
MAX_SHARE_OF_FIGURE = 0.1
"""A latency is wrong when the same figure of the client's lateness, P99 for P99, is more than this share of it."""
CLOCK_STEP = 0.002
"""Timers of an event loop have steps of a millisecond: less lateness than two of them says nothing."""

Figure = Callable[[Sequence[float]], float]
"""A mean or a percentile."""


class ClientHealth(NamedTuple):
    """Seconds."""

    cpu_share: float
    loop_lags: Sequence[float]
    late_sends: Sequence[float]
    """Of an open loop; a closed one sends when it can."""

    def lateness(self, metric: str, figure: Figure) -> float:
        """A first token and an end are late by what their sending and their reading were late; what lies between two
        tokens only by the latter; an average over many tokens by nothing that counts."""
        if metric == "tpot":
            return 0.0
        return _of(figure, self.loop_lags) + (0.0 if metric == "itl" else _of(figure, self.late_sends))

    def why_wrong(self, metric: str, figure: Figure, value: float) -> str | None:
        """Why a latency of `value` seconds says more of the client than of the server; None when it does not."""
        lateness = self.lateness(metric, figure)
        if lateness <= max(CLOCK_STEP, MAX_SHARE_OF_FIGURE * value):
            return None
        return f"the client was {lateness * 1e3:.1f} ms late"

    @property
    def why_too_busy(self) -> str | None:
        """Why no rate and no time per token is to be trusted."""
        if self.cpu_share <= MAX_CPU_SHARE:
            return None
        return f"the client used {self.cpu_share:.0%} of the one core that it can use"

    def as_json(self) -> dict[str, float]:
        figures: dict[str, Figure] = {"mean": np.mean, "p99": percentile(99)}
        lags = {f"{name}_loop_lag_ms": _of(figure, self.loop_lags) for name, figure in figures.items()}
        late = {f"{name}_late_send_ms": _of(figure, self.late_sends) for name, figure in figures.items()}
        ms = {name: round(seconds * 1e3, 3) for name, seconds in (lags | late).items()}
        return {"cpu_share": round(self.cpu_share, 3), **ms}


def percentile(rank: float) -> Figure:
    """Interpolated between the nearest two."""
    return lambda values: float(np.percentile(values, rank))


def _of(figure: Figure, values: Sequence[float]) -> float:
    return float(figure(values)) if len(values) else 0.0


class ClientMonitor:
    """Watches its own process from `start` to `stop`."""

    def start(self) -> None:
        self._lags: list[float] = []
        self._began = time.perf_counter(), time.process_time()
        self._ticking = asyncio.create_task(self._tick())

    def stop(self, late_sends: Sequence[float]) -> ClientHealth:
        self._ticking.cancel()
        seconds = time.perf_counter() - self._began[0]
        cpu_share = (time.process_time() - self._began[1]) / seconds if seconds else 0.0
        return ClientHealth(cpu_share, self._lags, late_sends)

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self._lags.append(max(0.0, time.perf_counter() - due))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection would stop the clock's reader for milliseconds."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
