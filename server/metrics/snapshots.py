"""`Snapshots`: how the engine is, asked once for all who want to know at about the same time."""

import asyncio
import time
from typing import Protocol

from engine.messages import Snapshot

PATIENCE = 1.0
"""Seconds for which the engine is waited for: it answers between two steps."""
BLOCKS_PER_SECOND = 100_000
"""How many blocks may be looked at; the core needs a quarter of a microsecond for each, a fortieth of its time."""
_BLOCKS_OF_REQUEST = 40
"""A request takes the core as long as so many blocks."""


class SnapshotSource(Protocol):
    async def snapshot(self) -> Snapshot: ...


class Snapshots:
    def __init__(self, engine: SnapshotSource) -> None:
        self._engine = engine
        self._asked: asyncio.Task[Snapshot] | None = None
        """At most one is on its way, however long it takes."""
        self._kept_until = 0.0

    async def latest(self) -> Snapshot:
        """The newest, which is kept for as long as it is dear. Raises `Unavailable`, and `TimeoutError`."""
        if self._asked is None or (self._asked.done() and time.monotonic() >= self._kept_until):
            self._asked = asyncio.create_task(self._ask())
        asked = self._asked
        await asyncio.wait({asked}, timeout=PATIENCE)
        if not asked.done():
            raise TimeoutError
        return asked.result()

    def seconds_kept(self) -> float:
        """Until there is a newer one."""
        return max(0.0, self._kept_until - time.monotonic())

    async def _ask(self) -> Snapshot:
        begun, self._kept_until = time.monotonic(), 0.0
        snapshot = await self._engine.snapshot()
        now = time.monotonic()
        cost = (len(snapshot.blocks) + _BLOCKS_OF_REQUEST * len(snapshot.requests)) / BLOCKS_PER_SECOND
        self._kept_until = now + (cost if now - begun < PATIENCE else max(cost, 1.0))  # who gave up asks again
        return snapshot
