"""Looks at the engine's blocks and at requests' timelines meanwhile, as the page does."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .answers import Events, Violation
from .connection import Connection, ConnectionLost, get

LIVE = "/v1/engine/live"
ANSWER_WITHIN = 8.0
"""Seconds: the engine is asked, and frozen ones are waited for."""
CACHED = 255


def check_frame(frame: dict[str, Any]) -> None:
    """A block is held as often as requests name it. Raises `Violation`."""
    engine = frame["engine"]
    if engine is None:
        if not frame["reason"]:
            raise Violation(f"an engine that cannot be seen, without a reason: {frame}")
        return
    states = [state for length, state in _pairs(engine["blocks"]) for _ in range(length)]
    held = Counter(
        block for request in engine["requests"] for first, length in _pairs(request["blocks"])
        for block in range(first, first + length)
    )  # fmt: skip
    wrong = {block: (state, held[block]) for block, state in enumerate(states) if state % CACHED != held[block]}
    if wrong or len(states) != engine["num_blocks"]:
        raise Violation(f"blocks with their states and holders: {wrong}, of {len(states)}; {frame}")
    num_running = sum(request["is_running"] for request in engine["requests"])
    if (engine["running"], engine["used_blocks"]) != (num_running, len(held)):
        raise Violation(f"{num_running} run and hold {len(held)} blocks, in {frame}")


class Spectator:
    def __init__(self, port: int, sent: Iterable[str], rng: random.Random) -> None:
        """`sent`: ids of requests, which grow."""
        self.port = port
        self.sent = sent
        self.rng = rng
        self.num_frames = 0
        self.num_timelines = 0
        self.violations: list[str] = []
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    async def run(self) -> None:
        while not self._is_over:
            try:
                await self.rng.choice((self.look, self.follow, self.ask))()
            except (Violation, OSError, ConnectionLost, TimeoutError) as error:
                self.violations.append(f"spectator: {error!r}")
            await asyncio.sleep(0.2)

    async def look(self) -> None:
        status, content = await get(self.port, LIVE, seconds=ANSWER_WITHIN)
        if status != 200:
            raise Violation(f"{LIVE}: {status} {content!r}")
        self._check(content)

    async def follow(self) -> None:
        """Frames as they come."""
        connection = await Connection.open(self.port)
        events = Events(b"\n\n")
        try:
            connection.send("GET", LIVE, headers={"Accept": "text/event-stream"})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.uniform(0.5, 4)):
                    async for piece in connection.pieces(await connection.head()):
                        for event in events.push(piece):
                            self._check(event)
        finally:
            connection.close()

    async def ask(self) -> None:
        """For the timeline of one that runs, has ended, or is forgotten."""
        if not self.sent:
            return
        name = self.rng.choice(list(self.sent)[-50:])
        status, content = await get(self.port, f"/v1/requests/{name}", seconds=ANSWER_WITHIN)
        if status not in (200, 404):
            raise Violation(f"timeline of {name}: {status} {content!r}")
        self.num_timelines += status == 200

    def _check(self, content: bytes) -> None:
        self.num_frames += 1
        check_frame(json.loads(content))


def _pairs(runs: list[int]) -> list[tuple[int, int]]:
    return list(zip(runs[::2], runs[1::2], strict=True))
