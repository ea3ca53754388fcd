"""A load on one server: when requests are due, sending them, and what came back.

Open loop: a sample is due at its arrival, whatever the server does, and its latencies count from then. A stalled server
cannot hold back the requests that would have felt the stall. Closed loop: a fixed number of users, each of which asks
as soon as it has its answer.

The intervals of an open loop come from a gamma distribution of mean 1 / rate and shape `burstiness`: 1 is a Poisson
process, less is burstier, infinity is a metronome. The variance of an interval is (1 / rate)² / burstiness.
"""

import argparse
import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tqdm import tqdm

from configs.errors import UsageError

from .client_health import ClientHealth
from .datasets import Draws, PromptMaker, Sample, generate, prompt_maker
from .flags import GENERATED
from .target import Message, Request, Response, Target, as_messages

OnResponse = Callable[[Response], bool]
"""Called with each whole response; true ends the run early."""


def arrival_times(rates: Sequence[float], burstiness: float, draw: random.Random) -> list[float]:
    """Ascending seconds, one for each of the rates, in requests per second, at which the requests come.

    At a constant rate the last is exactly `count / rate`, so that every draw offers the same load.
    """
    if math.isinf(burstiness):
        return list(accumulate(1 / rate for rate in rates))
    times = list(accumulate(draw.gammavariate(burstiness, 1 / (rate * burstiness)) for rate in rates))
    stretch = len(rates) / rates[0] / times[-1] if rates[0] == rates[-1] else 1.0
    return [time * stretch for time in times]


def ramp(strategy: str, start: float, end: float, count: int) -> list[float]:
    """Rates from `start` to `end`: evenly spaced (linear), or each a fixed multiple of the one before (exponential)."""
    shares = [index / max(1, count - 1) for index in range(count)]
    if strategy == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


@dataclass
class Run:
    """Responses in the order of their ends."""

    responses: list[Response] = field(default_factory=list)
    probes: list[Response] = field(default_factory=list)
    began: float = 0.0
    duration: float = 0.0
    health: ClientHealth = field(default_factory=ClientHealth)
    interrupted: bool = False
    """By Ctrl-C: what was under way is missing."""
    stopped: bool = False
    """Because more responses would change nothing: what was under way is missing."""


class Bench:
    """A server that is ready, and the workload for it."""

    def __init__(self, target: Target, arguments: argparse.Namespace, maker: PromptMaker | None, side: str) -> None:
        self.target = target
        self.arguments = arguments
        self._maker = maker
        self._side = side
        self._num_read = 0

    @classmethod
    async def open(cls, url: str, arguments: argparse.Namespace, side: str = "") -> "Bench":
        """Wait for the server, ask it a first request, and warm it up. Raises `UsageError`.

        Prompts of another `side` have equal lengths and other contents.
        """
        target = Target(url, arguments)
        try:
            await target.wait_until_ready(arguments.ready_check_timeout_sec)
            maker = await prompt_maker(target) if arguments.dataset_name in GENERATED else None
            bench = cls(target, arguments, maker, side)
            await bench._warm_up()
        except BaseException:
            await target.close()
            raise
        return bench

    @property
    def prompts(self) -> str:
        """How prompts are made."""
        return self._maker.description if self._maker else f"lines of {self.arguments.dataset_path}"

    async def run(self, rate: float, name: object, *, count: int | None = None, stop: OnResponse | None = None) -> Run:
        """Offer `rate` samples per second, or as many as there are places for. Equal names give equal lengths and
        arrivals."""
        arguments, count = self.arguments, count or self.arguments.num_prompts
        draws = Draws.of(arguments.seed, name, self._side)
        samples = self._samples(count, draws)
        rates = [] if math.isinf(rate) else [rate] * count
        if arguments.ramp_up_strategy is not None:
            ends = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
            rates = ramp(arguments.ramp_up_strategy, *ends, count)
        arrivals = arrival_times(rates, arguments.burstiness, draws.arrivals) if rates else None
        tqdm.monitor_interval = 0  # no thread of its own beside the one that reads the clock
        hidden = True if arguments.disable_tqdm else None  # None: unless stderr is a terminal
        with tqdm(total=sum(map(len, samples)), desc=self.target.url, unit="req", leave=False, disable=hidden) as bar:

            def on_response(response: Response) -> bool:
                bar.update()
                return stop is not None and stop(response)

            driver = _Driver(self.target, arguments, on_response)
            return await driver.run(samples, arrivals, arguments.probe_request_rate)

    def _samples(self, count: int, draws: Draws) -> list[Sample]:
        """Lines of a file follow each other from one run to the next, and begin anew at its end."""
        if self._maker:
            return generate(self.arguments, self._maker, count, draws)
        lines: list[Sample] = self.arguments.lines
        begin, self._num_read = self._num_read, self._num_read + count
        return [lines[index % len(lines)] for index in range(begin, begin + count)]

    async def _warm_up(self) -> None:
        """The first request, which must be answered, then the others together."""
        samples = self._samples(1 + self.arguments.num_warmups, Draws.of(self.arguments.seed, "warm-up", self._side))
        self._num_read = 0
        await self.target.check(samples[0][0])
        driver = _Driver(self.target, self.arguments, lambda response: False)
        if (await driver.run([sample[:1] for sample in samples[1:]])).interrupted:
            raise UsageError("interrupted during the warm-up")

    async def drain(self) -> None:
        """Wait for a small request, behind what the server may still have to do, whatever comes of it."""
        await self.target.send(Request("Hi", 1), Response(0.0))

    async def close(self) -> None:
        await self.target.close()


def swallow_interrupt() -> None:
    """Ctrl-C has cancelled this task, which goes on to report."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


class _Driver:
    """Sends the samples of one run."""

    def __init__(self, target: Target, arguments: argparse.Namespace, on_response: OnResponse) -> None:
        self._target = target
        self._think_time = arguments.think_time
        self._limit: int | None = arguments.max_concurrency
        self._slots = nullcontext() if self._limit is None else asyncio.Semaphore(self._limit)
        self._on_response = on_response
        self._result = Run()
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(
        self, samples: Sequence[Sample], arrivals: Sequence[float] | None = None, probe_rate: float = 0.0
    ) -> Run:
        """Ctrl-C ends the run and keeps the responses that were whole."""
        result = self._result
        with result.health.watch():
            result.began = time.perf_counter()
            self._tasks.append(asyncio.create_task(self._send_all(samples, arrivals)))
            if probe_rate:
                self._tasks.append(asyncio.create_task(self._probe(probe_rate)))
            try:
                await asyncio.wait(self._tasks[:1])
            except asyncio.CancelledError:
                swallow_interrupt()
                result.interrupted = True
            result.duration = time.perf_counter() - result.began
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        if isinstance(ends[0], Exception):
            raise ends[0]
        return result

    async def _send_all(self, samples: Sequence[Sample], arrivals: Sequence[float] | None) -> None:
        async with asyncio.TaskGroup() as group:
            if arrivals is None:
                waiting = iter(samples)
                for _ in range(min(self._limit or len(samples), len(samples))):
                    group.create_task(self._user(waiting))
                return
            for sample, arrival in zip(samples, arrivals, strict=True):
                due = self._result.began + arrival
                await _sleep_until(due)
                group.create_task(self._chat(sample, due))

    async def _user(self, samples: Iterator[Sample]) -> None:
        for sample in samples:
            await self._chat(sample, None)

    async def _chat(self, sample: Sample, due: float | None) -> None:
        """`due`: when the first request should be sent, and waits for a place from then on; None for now."""
        history: list[Message] = []
        for request in sample:
            now = time.perf_counter()
            if due is not None:
                self._result.health.late_sends.append(max(0.0, now - due))
            # a timer's step may be too early by half a millisecond
            response = Response(now if due is None else min(due, now))
            if history:
                request = Request(history + as_messages(request.prompt), request.output_len)
            async with nullcontext() if due is None else self._slots:
                await self._target.send(request, response)
            self._result.responses.append(response)
            if self._on_response(response):
                self._result.stopped = True
                self._tasks[0].cancel()
            if response.error is not None:
                return
            if len(sample) > 1:
                history = [*as_messages(request.prompt), {"role": "assistant", "content": response.text}]
                due = response.end + self._think_time
                await _sleep_until(due)

    async def _probe(self, rate: float) -> None:
        """Requests of one token, outside the limit of requests at once, each at its time."""

        async def send(response: Response) -> None:
            await self._target.send(Request("Hi", 1), response)
            self._result.probes.append(response)

        async with asyncio.TaskGroup() as group:
            due = self._result.began
            while True:
                await _sleep_until(due)
                group.create_task(send(Response(due)))
                due += 1 / rate


async def _sleep_until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
