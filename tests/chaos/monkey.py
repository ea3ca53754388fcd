"""What happens to the engine process meanwhile."""

import asyncio
import contextlib
import random
import time
from collections import Counter

import psutil

from .answers import Violation
from .connection import ConnectionLost, get
from .disturbances import Disturbance, Disturbances

READY_WITHIN = 60.0
"""Seconds until there is a new core, on a machine that is busy."""
FROZEN_WITHIN = 5.0
"""Seconds until a frozen core is told: 3 are promised."""
UNRESPONSIVE_TIMEOUT = 7.0
"""As the server is started."""


class Monkey:
    def __init__(
        self,
        port: int,
        server: psutil.Process,
        disturbances: Disturbances,
        rng: random.Random,
        is_short: bool = False,
    ) -> None:
        """`is_short`: without deeds that take long."""
        self.port = port
        self.server = server
        self.disturbances = disturbances
        self.rng = rng
        self.is_short = is_short
        self.deeds: Counter[str] = Counter()
        self.violations: list[str] = []
        self.recoveries: list[float] = []
        """Seconds from a kill until the server was ready again."""
        self.may_kill = True
        self._gone: set[int] = set()
        """Process ids of cores that were killed."""
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    def core(self) -> psutil.Process | None:
        """The engine process; None between two."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self.server.children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if child.pid not in self._gone and "engine.core_process" in child.cmdline():
                        return child
        return None

    async def run(self) -> None:
        """Kill and freeze cores, one deed at a time."""
        while not self._is_over:
            await asyncio.sleep(
                self.rng.choice((0.5, 2.0) if self.is_short else (0.5, 2.0, 6.0)) * self.rng.uniform(0.5, 1.5)
            )
            deeds = [self.freeze] * 4
            if self.may_kill:
                deeds += [self.kill] * 3 + [self.kill_twice] + [self.lame] * (not self.is_short)
            deed = self.rng.choice(deeds)
            self.deeds[deed.__name__] += 1
            try:
                await deed()
            except Violation as violation:
                self.violations.append(f"monkey: {deed.__name__}: {violation}")

    async def kill(self) -> None:
        with self.disturbances.one() as disturbance:
            await self._kill(disturbance)
            await self._ready_again(disturbance)

    async def kill_twice(self) -> None:
        """The second time while the new core loads."""
        with self.disturbances.one() as disturbance:
            await self._kill(disturbance)
            await asyncio.sleep(self.rng.uniform(0.05, 2.0))
            await self._kill(disturbance)
            await self._ready_again(disturbance)

    async def freeze(self) -> None:
        """For a while; sometimes while it loads."""
        core = await self._some_core()
        seconds = self.rng.choice((0.2, 1.0) if self.is_short else (0.2, 1.0, 2.5, 5.0)) * self.rng.uniform(0.7, 1.0)
        with self.disturbances.one(is_stop=True) as disturbance:
            core.suspend()
            stopped = time.monotonic()
            try:
                await asyncio.sleep(min(seconds, FROZEN_WITHIN))
                if time.monotonic() - stopped >= FROZEN_WITHIN - 0.5:
                    await self._expect_frozen(stopped)
            finally:
                core.resume()
            await self._ready_again(disturbance)

    async def lame(self) -> None:
        """Frozen until the server gives it up."""
        core = await self._some_core()
        with self.disturbances.one(is_stop=True) as disturbance:
            core.suspend()
            begin = alive = time.monotonic()
            while core.is_running() and core.status() != psutil.STATUS_ZOMBIE:
                alive = time.monotonic()
                if alive - begin > 3 * UNRESPONSIVE_TIMEOUT:
                    core.resume()
                    raise Violation("a frozen core was not killed")
                await asyncio.sleep(0.02)
            self._gone.add(core.pid)
            disturbance.kills.append(alive)
            await self._ready_again(disturbance)

    async def _kill(self, disturbance: Disturbance) -> None:
        core = await self._some_core()
        self._gone.add(core.pid)
        disturbance.kills.append(time.monotonic())
        core.kill()

    async def _some_core(self) -> psutil.Process:
        async with asyncio.timeout(READY_WITHIN):
            while (core := self.core()) is None:
                await asyncio.sleep(0.01)
            return core

    async def _ready_again(self, disturbance: Disturbance) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < READY_WITHIN:
            with contextlib.suppress(OSError, ConnectionLost, TimeoutError):
                status, _ = await get(self.port, "/health/ready", seconds=2)
                core = self.core()
                if status == 200 and core is not None and core.status() != psutil.STATUS_STOPPED:
                    if disturbance.kills:
                        self.recoveries.append(time.monotonic() - disturbance.kills[-1])
                    return
            await asyncio.sleep(0.05)
        raise Violation(f"the server is not ready after {READY_WITHIN} s")

    async def _expect_frozen(self, stopped: float) -> None:
        status, content = await get(self.port, "/health/live", seconds=2)
        seconds = time.monotonic() - stopped
        if (status, b'"frozen"' in content) != (503, True) and self.core() is not None:
            raise Violation(f"a core that is frozen for {seconds:.1f} s: {status} {content!r}")
