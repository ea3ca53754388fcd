"""One server with everybody at it: the chaos, the silence behind it, and the end."""

import asyncio
import contextlib
import signal
import socket
import time

import psutil

from tests.server.test_live_server import LiveServer

from .answers import Answer
from .clients import MOST_SECONDS, Clients
from .disturbances import Disturbances
from .jobs import Job
from .litter import Litter
from .monkey import Monkey
from .plan import Plan
from .report import Report, judge_memory
from .spectator import Spectator
from .verdicts import Attempt
from .watch import GAUGES, Watch, total

NUM_LITTERERS = 3
QUIET_WITHIN = 20.0
"""Seconds until everything that clients have left behind is gone."""
END_WITHIN = 40.0
"""Seconds from SIGTERM to the end of the process: --shutdown-timeout, and some more."""
CALM_CYCLE, CALM_PART = 150.0, 90.0
"""Seconds: of each cycle, the end has no kills, so that a core lives long enough for its memory to be measured."""
MOST_VIOLATIONS = 20


class Chaos:
    def __init__(self, plan: Plan, server: LiveServer, solo: dict[Job, Answer], report: Report) -> None:
        self.plan = plan
        self.server = server
        self.report = report
        self.process = psutil.Process(server.process.pid)
        self.clients = Clients(server.port, solo, Disturbances())
        self.monkey = Monkey(server.port, self.process, self.clients.disturbances, plan.rng("monkey"), plan.is_short)
        self.litterers = [Litter(server.port, plan.rng(f"litter {number}")) for number in range(NUM_LITTERERS)]
        self.watch = Watch(server.port, self.process, self.monkey.core)
        self.spectator = Spectator(server.port, self.clients.sent, plan.rng("spectator"))

    async def run(self) -> None:
        await self.clients.answer(self.clients.jobs[0])
        num_files = self.process.num_fds()
        begin = time.monotonic()
        await self._disturb()
        self.report.seconds = time.monotonic() - begin
        await self._check_quiet(num_files)
        await self._check_answers()
        judge_memory(self.report, self.watch)
        await self._end()
        self.report.gather(self.clients, self.monkey, self.litterers, self.watch, self.spectator)

    async def _disturb(self) -> None:
        clients, monkey = self.clients, self.monkey
        async with asyncio.TaskGroup() as group:
            plague = group.create_task(monkey.run())
            littering = [group.create_task(litterer.run()) for litterer in self.litterers]
            group.create_task(self.watch.run())
            group.create_task(self.spectator.run())
            for number in range(self.plan.num_clients):
                group.create_task(clients.client(str(number), self.plan.rng(f"client {number}")))
            await self._send_crowds()
            monkey.stop()
            for task in littering:
                task.cancel()
            await plague
            for one in (clients, self.watch, self.spectator):
                one.stop()

    async def _send_crowds(self) -> None:
        """Until the time is over, or nothing more is to be learned."""
        rng, begin, seconds = self.plan.rng("crowds"), time.monotonic(), self.plan.seconds
        while (now := time.monotonic() - begin) < seconds and not self._is_hopeless:
            self.monkey.may_kill = seconds < 2 * CALM_CYCLE or now % CALM_CYCLE < CALM_CYCLE - CALM_PART
            await asyncio.sleep(min(rng.uniform(2, 12), seconds - now))
            await self.clients.crowd(f"crowd-{now:.0f}", rng.choice((10, 60)), rng)

    @property
    def _is_hopeless(self) -> bool:
        found = sum(len(one.violations) for one in (self.clients, self.monkey, self.watch, self.spectator))
        return found >= MOST_VIOLATIONS

    async def _check_quiet(self, num_files: int) -> None:
        """All gauges return to 0, and what was opened is closed."""
        begin = time.monotonic()
        left: dict[str, float] = {}
        while time.monotonic() - begin < QUIET_WITHIN:
            await self.watch.scrape()
            left = {name: total(self.watch.metrics, name) for name in GAUGES}
            left["files"] = self.process.num_fds() - num_files
            left["processes"] = sum(not compiles(one) for one in self.process.children(recursive=True)) - 1
            if not any(left.values()):
                seconds = time.monotonic() - begin
                self.report.note(f"all gauges are 0 and {num_files} files open, {seconds:.1f} s later")
                return
            await asyncio.sleep(0.5)
        self.report.violations.append(f"{QUIET_WITHIN} s after the last request there are left: {left}")

    async def _check_answers(self) -> None:
        """Of what was asked in the chaos, a part once more."""
        rng, jobs = self.plan.rng("again"), self.clients.jobs
        for number, job in enumerate(rng.sample(jobs, min(20, len(jobs)))):
            if self._is_hopeless:
                return
            await self.clients.once(Attempt(f"chaos-again-{number}", job), rng)

    async def _end(self) -> None:
        """SIGTERM while requests run: they finish, and nothing is left behind."""
        rng, processes = self.plan.rng("end"), self.process.children(recursive=True)
        jobs = [job for job in self.clients.jobs if job.body.get("max_tokens", 0) >= 40][:6]
        attempts = [Attempt(f"chaos-end-{number}", job) for number, job in enumerate(jobs)]
        last = [asyncio.create_task(self.clients.once(attempt, rng)) for attempt in attempts]
        await asyncio.sleep(0.2)
        begin = time.monotonic()
        self.server.process.send_signal(signal.SIGTERM)
        await asyncio.wait(last, timeout=MOST_SECONDS)
        while self.server.process.poll() is None and time.monotonic() - begin < END_WITHIN:
            await asyncio.sleep(0.05)
        violations = self.report.violations
        if (code := self.server.process.poll()) != 0:
            violations.append(f"exit code {code}")
        _, left = psutil.wait_procs(processes, timeout=5)
        violations += [f"process {one.pid} is left" for one in left if lives(one)]
        try:
            socket.create_server(("127.0.0.1", self.server.port)).close()
        except OSError as error:
            violations.append(f"the port is not free: {error}")
        seconds = time.monotonic() - begin
        self.report.note(f"the server ended {seconds:.1f} s after SIGTERM, with {len(last)} requests under way")


def compiles(process: psutil.Process) -> bool:
    """Whether it is the engine's compiler of grammars, which is kept for the next one."""
    with contextlib.suppress(psutil.Error):
        return "engine.structured.trial" in process.cmdline()
    return True  # it has ended


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
