"""Sends samples when they are due, and keeps what came back.

Open loop: a sample is due at its arrival, whatever the server does, and its latencies count from then. A stalled server
cannot hold back the requests that would have felt the stall. Closed loop: a fixed number of users, each of which asks
as soon as it has its answer.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from .answer import Answer
from .datasets import Sample
from .saturation import ClientHealth, ClientMonitor, no_garbage_collection
from .target import Ask, Message, Target, as_messages

OnAnswer = Callable[[Answer], bool]
"""Called with each whole answer; true ends the run early."""


UNWATCHED = ClientHealth(0.0, (), ())


@dataclass
class Load:
    """How samples are offered. Without arrivals all are due as soon as `max_concurrency` lets them."""

    arrivals: Sequence[float] | None = None
    max_concurrency: int | None = None
    think_time: float = 0.0
    """Seconds between an answer and the next request of the same chat."""
    probe_rate: float = 0.0
    """Requests of one token per second beside the load."""


@dataclass
class Run:
    """Answers in the order of their ends."""

    answers: list[Answer] = field(default_factory=list)
    probes: list[Answer] = field(default_factory=list)
    began: float = 0.0
    duration: float = 0.0
    health: ClientHealth = UNWATCHED
    interrupted: bool = False
    """By Ctrl-C: what was under way is missing."""
    stopped: bool = False
    """Because its outcome was settled: what was under way is missing."""


async def drive(target: Target, samples: Sequence[Sample], load: Load, on_answer: OnAnswer) -> Run:
    """Ctrl-C ends the run and keeps the answers that were whole."""
    with no_garbage_collection():
        driver = _Driver(target, load, on_answer)
        return await driver.run(samples)


def swallow_interrupt() -> None:
    """Ctrl-C has cancelled this task, which goes on to report."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


class _Driver:
    def __init__(self, target: Target, load: Load, on_answer: OnAnswer) -> None:
        self._target = target
        self._load = load
        self._on_answer = on_answer
        self._result = Run()
        self._late_sends: list[float] = []
        self._stop = asyncio.Event()
        limit = load.max_concurrency
        self._slots: AbstractAsyncContextManager[Any] = nullcontext() if limit is None else asyncio.Semaphore(limit)

    async def run(self, samples: Sequence[Sample]) -> Run:
        result, monitor = self._result, ClientMonitor()
        monitor.start()
        result.began = time.perf_counter()
        work = asyncio.create_task(self._send_all(samples))
        others: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.wait())]
        if self._load.probe_rate:
            others.append(asyncio.create_task(self._probe()))
        try:
            await asyncio.wait([work, others[0]], return_when=asyncio.FIRST_COMPLETED)
            result.stopped = not work.done()
        except asyncio.CancelledError:
            swallow_interrupt()
            result.interrupted = True
        result.duration = time.perf_counter() - result.began
        result.health = monitor.stop(self._late_sends)
        for task in (work, *others):
            task.cancel()
        ends = await asyncio.gather(work, *others, return_exceptions=True)
        if isinstance(ends[0], Exception):
            raise ends[0]
        return result

    async def _send_all(self, samples: Sequence[Sample]) -> None:
        async with asyncio.TaskGroup() as group:
            if self._load.arrivals is None:
                waiting = iter(samples)
                for _ in range(min(self._load.max_concurrency or len(samples), len(samples))):
                    group.create_task(self._user(waiting))
                return
            for sample, arrival in zip(samples, self._load.arrivals, strict=True):
                due = self._result.began + arrival
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._chat(sample, due))

    async def _user(self, samples: Any) -> None:
        for sample in samples:
            await self._chat(sample, None)

    async def _chat(self, sample: Sample, due: float | None) -> None:
        """`due`: when the first request should be sent; None for now."""
        history: list[Message] = []
        for ask in sample:
            now = time.perf_counter()
            if due is not None:
                self._late_sends.append(max(0.0, now - due))
            # a timer's step may be too early by half a millisecond
            answer = Answer(now if due is None else min(due, now))
            if history:
                ask = Ask(history + as_messages(ask.prompt), ask.output_len)
            await self._exchange(ask, answer, queues=due is not None)
            if answer.error is not None:
                return
            if len(sample) > 1:
                history = [*as_messages(ask.prompt), {"role": "assistant", "content": answer.text}]
                due = answer.end + self._load.think_time
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _exchange(self, ask: Ask, answer: Answer, *, queues: bool) -> None:
        if queues:
            async with self._slots:
                await self._target.send(ask, answer)
        else:
            await self._target.send(ask, answer)
        self._result.answers.append(answer)
        if self._on_answer(answer):
            self._stop.set()

    async def _probe(self) -> None:
        """Outside the limit of requests at once, each at its time."""
        count = 0
        async with asyncio.TaskGroup() as group:
            while True:
                due = self._result.began + count / self._load.probe_rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._send_probe(Answer(due)))
                count += 1

    async def _send_probe(self, answer: Answer) -> None:
        await self._target.send(Ask("Hi", 1), answer)
        self._result.probes.append(answer)
