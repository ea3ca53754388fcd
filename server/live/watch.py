"""`Watch`: asks the engine how it is while somebody wants to know, once for all who do."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from configs.errors import RequestError
from engine.messages import Snapshot
from server.live.frame import Frame, live_engine
from server.protocol.live import Live
from server.serving import Serving

INTERVAL = 0.2
"""Seconds from one look to the next."""


class Watch:
    """Looks while it has viewers. Each gets the newest frame, as often as it can take one."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._num_viewers = 0
        self._looking: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Frame]

    @property
    def num_viewers(self) -> int:
        return self._num_viewers

    async def frames(self, owner: str = "") -> AsyncGenerator[bytes, None]:
        """As `owner` sees them; ends when the server ends."""
        self._num_viewers += 1
        if self._looking is None:
            self._next = asyncio.get_running_loop().create_future()
            self._looking = asyncio.create_task(self._look())
        try:
            while not self._is_ending:
                yield (await asyncio.shield(self._next)).seen_by(owner)
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._stop()

    @property
    def _is_ending(self) -> bool:
        return self._serving.drained_by is not None or self._serving.engine.is_dead

    def _stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = None

    async def _look(self) -> None:
        try:
            while True:
                live = await self._live()
                shown, self._next = self._next, asyncio.get_running_loop().create_future()
                shown.set_result(Frame(live, self._serving.telemetry.owner_of))
                await asyncio.sleep(max(INTERVAL, self._serving.telemetry.snapshots.seconds_kept()))
        except Exception as error:  # a fault of ours, which viewers hear of
            self._next.set_exception(error)

    async def _live(self) -> Live:
        health = self._serving.engine.health()
        snapshot, reason = await self._snapshot() if health.status == "ok" else (None, health.reason)
        now = time.monotonic()
        figures = self._serving.telemetry.figures
        return Live(
            time=round(now, 3),
            status=health.status,
            reason=reason,
            output_tokens=figures.num_output_tokens,
            first_tokens=int(figures.first_token.buckets()[-1][1]),
            first_token_seconds=round(figures.first_token.sum, 4),
            engine=None if snapshot is None else live_engine(snapshot, self._serving.engine.info.block_size, now),
        )

    async def _snapshot(self) -> tuple[Snapshot | None, str]:
        """Or why there is none."""
        try:
            return await self._serving.telemetry.snapshots.latest(), ""
        except TimeoutError:
            return None, "the engine is at a long step"
        except RequestError as error:
            return None, error.message


async def one_frame(watch: Watch, owner: str) -> bytes:
    async with contextlib.aclosing(watch.frames(owner)) as frames:
        return await anext(frames)
