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
    """What came of offering some samples; the responses are in the order of their ends."""

    on_response: OnResponse
    responses: list[Response] = field(default_factory=list)
    probes: list[Response] = field(default_factory=list)
    began: float = 0.0
    duration: float = 0.0
    health: ClientHealth = field(default_factory=ClientHealth)
    interrupted: bool = False
    """By Ctrl-C: what was under way is missing."""
    stopped: bool = False
    """Because more responses would change nothing: what was under way is missing."""
    work: asyncio.Task[None] | None = None

    def keep(self, response: Response) -> None:
        self.responses.append(response)
        if self.on_response(response) and self.work is not None:
            self.stopped = True
            self.work.cancel()


class Bench:
    """A server that is ready, and the workload for it."""

    def __init__(self, target: Target, arguments: argparse.Namespace, side: str) -> None:
        """Prompts of another `side` have equal lengths and other contents."""
        self.target = target
        self.arguments = arguments
        self._side = side
        self._maker: PromptMaker | None = None
        self._num_read = 0
        limit = arguments.max_concurrency
        self._slots = nullcontext() if limit is None else asyncio.Semaphore(limit)

    @classmethod
    async def open(cls, url: str, arguments: argparse.Namespace, side: str = "") -> "Bench":
        """Wait for the server, ask it a first request, and warm it up. Raises `UsageError`."""
        bench = cls(Target(url, arguments), arguments, side)
        try:
            await bench.target.wait_until_ready(arguments.ready_check_timeout_sec)
            if arguments.dataset_name in GENERATED:
                bench._maker = await prompt_maker(bench.target)
            first, *others = bench._samples(1 + arguments.num_warmups, Draws.of(arguments.seed, "warm-up", side))
            bench._num_read = 0
            await bench.target.check(first[0])
            run = await bench._drive([sample[:1] for sample in others], lambda response: False)
            if run.interrupted:
                raise UsageError("interrupted during the warm-up")
        except BaseException:
            bench.close()
            raise
        return bench

    @property
    def prompts(self) -> str:
        """How prompts are made."""
        return self._maker.description if self._maker else f"lines of {self.arguments.dataset_path}"

    def _samples(self, count: int, draws: Draws) -> list[Sample]:
        """Lines of a file follow each other from one run to the next, and begin anew at its end."""
        if self._maker:
            return generate(self.arguments, self._maker, count, draws)
        lines: list[Sample] = self.arguments.lines
        begin, self._num_read = self._num_read, self._num_read + count
        return [lines[index % len(lines)] for index in range(begin, begin + count)]

    async def run(self, rate: float, name: object, *, count: int | None = None, stop: OnResponse | None = None) -> Run:
        """Offer `rate` samples per second, or as many as there are places for.

        Runs of equal names have equal lengths and arrivals.
        """
        arguments, count = self.arguments, count or self.arguments.num_prompts
        draws = Draws.of(arguments.seed, name, self._side)
        samples = self._samples(count, draws)
        rates = [] if math.isinf(rate) else [rate] * count
        if arguments.ramp_up_strategy is not None:
            rates = ramp(arguments.ramp_up_strategy, arguments.ramp_up_start_rps, arguments.ramp_up_end_rps, count)
        arrivals = arrival_times(rates, arguments.burstiness, draws.arrivals) if rates else None
        tqdm.monitor_interval = 0  # no thread of its own beside the one that reads the clock
        hidden = True if arguments.disable_tqdm else None  # None: unless stderr is a terminal
        with tqdm(total=sum(map(len, samples)), desc=self.target.url, unit="req", leave=False, disable=hidden) as bar:

            def on_response(response: Response) -> bool:
                bar.update()
                return stop is not None and stop(response)

            return await self._drive(samples, on_response, arrivals, arguments.probe_request_rate)

    async def _drive(
        self,
        samples: Sequence[Sample],
        on_response: OnResponse,
        arrivals: Sequence[float] | None = None,
        probe_rate: float = 0.0,
    ) -> Run:
        """Ctrl-C ends the run and keeps the responses that were whole."""
        run = Run(on_response)
        with run.health.watch():
            run.began = time.perf_counter()
            run.work = asyncio.create_task(self._send_all(samples, arrivals, run))
            probing = asyncio.create_task(self._probe(probe_rate, run))
            try:
                await asyncio.wait([run.work])
            except asyncio.CancelledError:
                swallow_interrupt()
                run.interrupted = True
            run.duration = time.perf_counter() - run.began
        run.work.cancel()
        probing.cancel()
        ends = await asyncio.gather(run.work, probing, return_exceptions=True)
        if isinstance(ends[0], Exception):
            raise ends[0]
        return run

    async def _send_all(self, samples: Sequence[Sample], arrivals: Sequence[float] | None, run: Run) -> None:
        async with asyncio.TaskGroup() as group:
            if arrivals is None:
                waiting = iter(samples)
                for _ in range(min(self.arguments.max_concurrency or len(samples), len(samples))):
                    group.create_task(self._user(waiting, run))
                return
            for sample, arrival in zip(samples, arrivals, strict=True):
                await _sleep_until(run.began + arrival)
                group.create_task(self._chat(sample, run.began + arrival, run))

    async def _user(self, samples: Iterator[Sample], run: Run) -> None:
        for sample in samples:
            await self._chat(sample, None, run)

    async def _chat(self, sample: Sample, due: float | None, run: Run) -> None:
        """`due`: when the first request should be sent, and waits for a place from then on; None for now."""
        history: list[Message] = []
        for request in sample:
            now = time.perf_counter()
            if due is not None:
                run.health.late_sends.append(max(0.0, now - due))
            # a timer's step may be too early by half a millisecond
            response = Response(now if due is None else min(due, now))
            if history:
                request = Request(history + as_messages(request.prompt), request.output_len)
            async with nullcontext() if due is None else self._slots:
                await self.target.send(request, response)
            run.keep(response)
            if response.error is not None:
                return
            if len(sample) > 1:
                history = [*as_messages(request.prompt), {"role": "assistant", "content": response.text}]
                due = response.end + self.arguments.think_time
                await _sleep_until(due)

    async def _probe(self, rate: float, run: Run) -> None:
        """Requests of one token, outside the limit of requests at once, each at its time."""

        async def send(response: Response) -> None:
            await self.target.send(Request("Hi", 1), response)
            run.probes.append(response)

        async with asyncio.TaskGroup() as group:
            due = run.began
            while rate:
                await _sleep_until(due)
                group.create_task(send(Response(due)))
                due += 1 / rate

    async def drain(self) -> None:
        """Wait for a small request, behind what the server may still have to do, whatever comes of it."""
        await self.target.send(Request("Hi", 1), Response(0.0))

    def close(self) -> None:
        self.target.close()


def swallow_interrupt() -> None:
    """Ctrl-C has cancelled this task, which goes on to report."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def _sleep_until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
