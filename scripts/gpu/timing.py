"""Time on the device: what is queued is captured once and replayed, so that the host's time does not count."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from engine.decode_graphs import GraphPool

SECONDS = 0.25
"""Of one measurement."""


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """All calls in one CUDA graph, to be replayed; on a CPU they are called again."""

    def work() -> None:
        for call in calls:
            call()

    if torch.cuda.is_available():
        return GraphPool(torch.device("cuda")).record(work)
    work()
    return work


def eager(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """The calls one behind the other."""

    def work() -> None:
        for call in calls:
            call()

    return work


def seconds(run: Callable[[], object], duration: float = SECONDS) -> float:
    """Median of as many runs as `duration` has room for, three at least; on a CPU of one."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    run()
    torch.cuda.synchronize()
    began, pairs = time.perf_counter(), []
    while len(pairs) < 3 or time.perf_counter() - began < duration:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        pairs.append(start.elapsed_time(end) / 1e3)
    return statistics.median(pairs)
