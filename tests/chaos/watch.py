"""What the server's processes take, and what it says of itself, once a second."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import psutil

from .connection import ConnectionLost, get

GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "octavo:requests_waiting",
    "octavo:http_requests_running",
)
ANSWER_WITHIN = 5.0
"""Seconds, of routes that ask nobody, while two processors have all the rest to do."""
MB = 2**20
Sample = tuple[float, float]
"""Seconds, and what was measured then."""


def slope(samples: Sequence[Sample]) -> float:
    """Of the straight line with the least squares, per second; 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / sum((x - mean_x) ** 2 for x, _ in samples)


def parse_metrics(text: str) -> dict[str, float]:
    """By name and labels, as they are written."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def total(metrics: dict[str, float], name: str) -> float:
    """Of all series with that name."""
    return sum(value for series, value in metrics.items() if series.partition("{")[0] == name)


class Watch:
    def __init__(self, port: int, server: psutil.Process, core: Callable[[], psutil.Process | None]) -> None:
        self.port = port
        self.server = server
        self.core = core
        self.violations: list[str] = []
        self.server_memory: list[Sample] = []
        self.core_memory: dict[int, list[Sample]] = defaultdict(list)
        """By process id."""
        self.num_files: list[Sample] = []
        self.metrics: dict[str, float] = {}
        self.slowest: dict[str, float] = defaultdict(float)
        """Seconds that an answer took at most, by path."""
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    async def run(self) -> None:
        while not self._is_over:
            self.sample()
            await self.ask("/health/live")
            await self.scrape()
            await asyncio.sleep(1)

    def sample(self) -> None:
        now = time.monotonic()
        self.server_memory.append((now, self.server.memory_info().rss))
        self.num_files.append((now, self.server.num_fds()))
        with contextlib.suppress(psutil.NoSuchProcess):
            if core := self.core():
                self.core_memory[core.pid].append((now, core.memory_info().rss))

    async def scrape(self) -> None:
        """Counters must not fall."""
        before, answer = self.metrics, await self.ask("/metrics")
        if answer is None:
            return
        self.metrics = parse_metrics(answer[1].decode())
        for series, value in self.metrics.items():
            is_counter = series.partition("{")[0].endswith(("_total", "_count", "_bucket", "_sum"))
            if is_counter and "process" not in series and value < before.get(series, 0.0):
                self.violations.append(f"{series} fell from {before[series]} to {value}")

    async def ask(self, path: str) -> tuple[int, bytes] | None:
        begin = time.monotonic()
        try:
            answer = await get(self.port, path, seconds=ANSWER_WITHIN)
        except (TimeoutError, OSError, ConnectionLost) as error:
            self.violations.append(f"{path}: {error!r}")
            return None
        self.slowest[path] = max(self.slowest[path], time.monotonic() - begin)
        return answer
