"""`Supervisor`: keeps one core process running, and knows how it is. Imports no torch."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from configs.errors import EngineDead, Unavailable, UsageError
from configs.settings import EngineConfig
from scheduler.timeline import Counters

from .core_client import CoreClient
from .messages import NO_STATS, CoreReady, Snapshot, StepStats, ToCore, TokenOutput

logger = logging.getLogger("octavo.engine")

FROZEN_AFTER = 3.0
"""Seconds without a sign of life; a core gives one every quarter of a second."""
_LOOK_INTERVAL = 0.5
_SOUND_AFTER = 60.0
"""Seconds of readiness after which the end of a core does not count as one of a row."""

Status = Literal["ok", "restarting", "frozen", "stuck", "dead"]


@dataclass(frozen=True)
class Supervision:
    """How a core is looked after. Times are seconds."""

    max_restarts: int = 0
    """In a row, of cores that end before they have answered a request."""
    patience: float = 0.0
    """How long a new request waits for a core that is not available."""
    step_timeout: float = 300.0
    """A core whose loop is at one turn for longer is stuck."""
    unresponsive_timeout: float = 0.0
    """A core that is frozen or stuck for longer is killed; 0: never."""


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the core is now."""

    status: Status
    reason: str = ""
    """Where the status is not `ok`, for people."""
    beat_age: float = 0.0
    """Seconds since the core showed that it runs."""
    step_age: float = 0.0
    """Seconds that the core's step takes by now; 0 between steps."""
    num_steps: int = 0
    """Turns of the core's loop."""


class Supervisor:
    """Starts the core and, when it ends, another one, with the same settings.

    loading ──> ok <──> frozen, stuck       as its page of memory tells
                 │          │ unresponsive_timeout
                 └─> ended <┘
                       ├─> restarting ──> ok
                       └─> dead             after max_restarts in a row
    """

    def __init__(self, config: EngineConfig, core: Sequence[str], supervision: Supervision) -> None:
        self.on_outputs: Callable[[list[TokenOutput]], None] = lambda outputs: None
        """Called with the outputs of each step that has any. To be set before `wait_ready`."""
        self.on_end: Callable[[Unavailable], None] = lambda error: None
        """Called when a core has ended: what it was at is lost."""
        self.info: CoreReady
        self.client: CoreClient
        self._config = config
        self._core = core
        self._supervision = supervision
        self._is_loaded = False
        self._status: Status = "ok"
        self._unwell_since = 0.0
        self._num_failures = 0
        self._has_answered = False
        self._launched = self._ready = 0.0
        self._seconds_to_start = 0.0
        self._num_launched = 0
        self._past = Counters()  # of the cores before this one
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = asyncio.Event()
        """Set while requests need not wait: the core answers, or there will not be another one."""
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason in one line, when there will not be another core."""

    async def launch(self) -> None:
        """Start a process. Raises `UsageError`."""
        self._launched = time.monotonic()
        client = await CoreClient.start(self._config, self._core)
        if self._num_launched:
            self._past = self._counters()
        self._num_launched += 1
        self.client = client

    async def wait_ready(self) -> None:
        """Wait until the core that was launched has loaded, and look after it from then on. Raises `UsageError`."""
        await self._load()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._look())]
        for task in self._tasks:
            task.add_done_callback(self._note_end_of_care)

    @property
    def is_dead(self) -> bool:
        return self.death.done()

    def send(self, message: ToCore) -> None:
        """To the running core; without one, there is nobody for whom it would mean anything."""
        if self._is_loaded:
            self.client.send(message)

    def note_answer(self) -> None:
        """The running core has answered a request."""
        self._has_answered = True

    @property
    def num_restarts(self) -> int:
        return self._num_launched - 1

    def stats(self) -> StepStats:
        """The newest; counters are summed over all cores there were, so that they never fall."""
        newest = self.client.stats if self._is_loaded else None
        return msgspec.structs.replace(newest or NO_STATS, counters=self._counters())

    async def snapshot(self) -> Snapshot:
        """How the core is behind its step. Raises `Unavailable` when there is none, or it ends meanwhile."""
        if not self._is_loaded:
            raise Unavailable(self.health().reason, code="engine_restarting")
        return await self.client.snapshot()

    def _counters(self) -> Counters:
        newest = self.client.stats
        return self._past if newest is None else self._past + newest.counters

    def health(self) -> EngineHealth:
        if self.is_dead:
            return EngineHealth(status="dead", reason=self.death.result())
        pulse, step_timeout = self.client.pulse(), self._supervision.step_timeout
        status: Status = "ok" if self._is_loaded else "restarting"
        reason = ""
        if pulse.beat_age > (FROZEN_AFTER if self._is_loaded else step_timeout):
            status, reason = "frozen", f"the engine has given no sign of life for {pulse.beat_age:.1f} s"
        elif pulse.turn_age > step_timeout:
            status, reason = "stuck", f"the engine's step takes {pulse.turn_age:.1f} s by now"
        elif not self._is_loaded:
            reason = f"the engine is being started, for {time.monotonic() - self._launched:.1f} s by now"
        self._note(status, reason)
        return EngineHealth(
            status=status, reason=reason, beat_age=pulse.beat_age, step_age=pulse.turn_age, num_steps=pulse.num_turns
        )

    async def wait_available(self, deadline: float | None) -> None:
        """Return when a request would be answered. Raises `EngineDead`, or `Unavailable` when patience, or the
        request's time, is over."""
        until = time.monotonic() + self._supervision.patience
        until = until if deadline is None else min(until, deadline)
        while not self.is_available:
            if self.is_dead:
                raise EngineDead(self.death.result())
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await self._settled.wait()
            except TimeoutError as error:
                if (health := self.health()).status != "ok":
                    code, retry_after = f"engine_{health.status}", self.seconds_to_wait()
                    raise Unavailable(health.reason, code=code, retry_after=retry_after) from error

    @property
    def is_available(self) -> bool:
        """Whether a request would be answered without waiting for a core."""
        return self._is_loaded and self._status == "ok"

    def seconds_to_wait(self) -> int:
        """Until the core is likely to be there, by how long the latest start took; at least 1."""
        under_way = 0.0 if self._is_loaded else time.monotonic() - self._launched
        return max(1, math.ceil(self._seconds_to_start - under_way))

    async def close(self, reason: str) -> None:
        """End the core; `reason` is told to those whose requests still run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._die(reason)
        await self.client.close()

    async def _load(self) -> None:
        self.info = await self.client.wait_ready()
        self.client.on_outputs = self.on_outputs
        self._ready = time.monotonic()
        self._seconds_to_start = self._ready - self._launched
        self._status = "ok"
        self._has_answered = False
        self._is_loaded = True
        self._settled.set()

    def _note_end_of_care(self, task: asyncio.Task[None]) -> None:
        """Without the two tasks nobody would replace a core that ends: a fault of theirs ends the engine."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("the engine is not looked after any more", exc_info=error)
        self._die(f"the engine is not looked after any more: {type(error).__name__}; see the server's log")

    async def _watch(self) -> None:
        """Until there will be no other core."""
        while not self.is_dead:
            await self._replace(f"the engine has stopped ({await self.client.wait_end()}); see the server's log")

    async def _look(self) -> None:
        """Note how the core is; kill it if it has been unwell for long."""
        timeout = self._supervision.unresponsive_timeout
        while not self.is_dead:
            await asyncio.sleep(_LOOK_INTERVAL)
            health = self.health()
            is_unwell = health.status in ("frozen", "stuck")
            if is_unwell and timeout and time.monotonic() - self._unwell_since > timeout:
                logger.error("%s: it is killed", health.reason)
                self.client.kill()

    def _note(self, status: Status, reason: str) -> None:
        if status == self._status:
            return
        if status in ("frozen", "stuck"):
            self._unwell_since = time.monotonic()
            logger.warning(reason)
        elif status == "ok" and self._status in ("frozen", "stuck"):
            logger.warning("the engine moves on, after %.1f s", time.monotonic() - self._unwell_since)
        self._status = status
        if status == "ok":
            self._settled.set()
        else:
            self._settled.clear()

    async def _replace(self, reason: str) -> None:
        """Another core for the one that has ended, unless too many did so before they were of use."""
        is_sound = self._has_answered or time.monotonic() - self._ready > _SOUND_AFTER
        self._is_loaded = False
        self._settled.clear()
        self._launched = time.monotonic()
        self._num_failures = 0 if is_sound else self._num_failures
        while True:
            self._num_failures += 1
            logger.error(reason)
            if self._num_failures > self._supervision.max_restarts:
                self._die(self._last_words(reason))
                return
            self._end(EngineDead(reason, retry_after=self.seconds_to_wait()))
            await self.client.close()
            await asyncio.sleep(self._num_failures - 1)
            try:
                await self.launch()
                await self._load()
            except UsageError as error:
                reason = str(error)
                continue
            except Exception as error:  # of the system, or a fault of ours: the next start may fare better
                logger.error("the engine has not started", exc_info=error)
                reason = f"the engine has not started: {type(error).__name__}: {error}"
                continue
            logger.warning("the engine is there again, after %.1f s", self._seconds_to_start)
            return

    def _last_words(self, reason: str) -> str:
        if self._num_failures == 1:
            return reason
        return f"the engine ended {self._num_failures} times in a row before it answered a request; the last: {reason}"

    def _die(self, reason: str) -> None:
        self._is_loaded = False
        if not self.death.done():
            self.death.set_result(reason)
        self._settled.set()
        self._end(EngineDead(reason))

    def _end(self, error: Unavailable) -> None:
        self.client.fail_snapshots(error)
        self.on_end(error)
