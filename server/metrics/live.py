"""GET /v1/engine/live: what the engine does at this moment, asked once for all who want to know."""

import asyncio
import hashlib
import os
import re
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import RequestError
from engine.messages import Snapshot
from engine.supervisor import Status
from server.bodies import BodyRoute
from server.documented import EVENTS, streamed
from server.errors import ErrorResponse, openai_error
from server.metrics.records import current_owner
from server.middleware import METHOD
from server.serving import Serving, ServingOf
from server.sse import EventStream, EventWriter, event

router = APIRouter(route_class=BodyRoute, tags=["Server"])

INTERVAL = 0.2
"""Seconds from one event of a viewer to its next."""
PATIENCE = 1.0
"""Seconds for which the engine is waited for: it answers between two steps."""
BLOCKS_PER_SECOND = 100_000
"""How many blocks may be looked at; the core needs a quarter of a microsecond for each, a fortieth of its time."""
BLOCKS_PER_REQUEST = 40
"""How many blocks take the core as long as a request."""
_SECRET = os.urandom(32)
_RUN = re.compile(rb"(.)\1*", re.DOTALL)


class LiveRequest(TypedDict):
    id: str
    is_running: bool
    age: float
    """Seconds since it came."""
    ttft: float | None
    """Seconds from its coming to its first token."""
    prompt_tokens: int
    tokens: int
    """Tokens of prompt and output."""
    computed_tokens: int
    """Those of `tokens` whose KV is in the blocks."""
    preemptions: int
    recomputed_tokens: int
    blocks: list[int]
    """Runs of block numbers in order of position: first, length, first, length, … Runs that begin with 0 stand for
    places that a sliding window has left."""


class LiveEngine(TypedDict):
    """Counts of steps, tokens and preemptions are since the start of the engine."""

    running: int
    waiting: int
    wait_cause: str | None
    """What those who wait have too little of: blocks, seats (requests in a step), tokens (of a step)."""
    used_blocks: int
    num_blocks: int
    """The reserved block 0 included."""
    block_size: int
    """Tokens of a block."""
    step_seconds: float
    """Seconds of the newest step."""
    step_tokens: int
    """Tokens of the newest step."""
    steps: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    prefix_queries: int
    """Tokens that were looked for in the prefix cache."""
    prefix_hits: int
    requests: list[LiveRequest]
    """Running ones first; then the first 256 waiting ones, in their order."""
    blocks: list[int]
    """Runs of equal blocks from block 0 on: length, state, length, state, … A state is the number of requests that
    hold the block, 254 at most; 255 is a free block with content that can be found again."""


class Live(TypedDict):
    """Counts of tokens are since the start of the server."""

    time: float
    """Seconds of the server's monotonic clock."""
    status: Status
    reason: str
    """Why the status is not `ok`, or there is no `engine`."""
    output_tokens: int
    first_tokens: int
    """Choices that have got a first token."""
    first_token_seconds: float
    """The time from the coming of those choices until then, summed."""
    engine: LiveEngine | None
    """Null while it cannot tell."""


class LiveView(EventWriter):
    """How the engine is, asked once for all who want to know at about the same time; and the writer of their events."""

    def __init__(self, serving: Serving) -> None:
        self._serving, self._engine = serving, serving.engine
        self._asked: asyncio.Task[Snapshot] | None = None
        """At most one is on its way, however long it takes."""
        self._answered = self._kept_until = 0.0
        self._seen: dict[str, LiveEngine] = {}
        """The newest snapshot as each owner may see it."""

    async def snapshot(self, max_age: float = 0.0) -> Snapshot:
        """At most `max_age` seconds old, unless a new one would cost the engine too much time.

        Raises `Unavailable`, and `TimeoutError`.
        """
        kept_until = max(self._kept_until, self._answered + max_age)
        if self._asked is None or (self._asked.done() and time.monotonic() >= kept_until):
            self._asked = asyncio.create_task(self._ask())
        return await asyncio.wait_for(asyncio.shield(self._asked), PATIENCE)

    async def _ask(self) -> Snapshot:
        begun, self._answered, self._kept_until = time.monotonic(), 0.0, 0.0
        snapshot = await self._engine.snapshot()
        self._answered, self._seen = time.monotonic(), {}
        cost = (len(snapshot.blocks) + BLOCKS_PER_REQUEST * len(snapshot.requests)) / BLOCKS_PER_SECOND
        is_late = self._answered - begun >= PATIENCE  # who asked has given up, and asks again
        self._kept_until = self._answered + (max(cost, 1.0) if is_late else cost)
        return snapshot

    async def seen_by(self, owner: str) -> bytes:
        """JSON of a `Live`. Other owners' requests have names that tell nothing of theirs, the same ones each time.

        Without keys the owner is empty, and sees everything.
        """
        health, metrics = self._engine.health(), self._serving.metrics
        reason, engine = health.reason, None
        if health.status == "ok":
            try:
                snapshot = await self.snapshot(0.9 * INTERVAL)  # less, so that no viewer gets one twice
                engine = self._seen.get(owner) or self._engine_seen_by(owner, snapshot)
            except TimeoutError:
                reason = "the engine is at a long step"
            except RequestError as error:
                reason = error.message
        live: Live = {
            "time": round(time.monotonic(), 3),
            "status": health.status,
            "reason": reason,
            "output_tokens": metrics.num_generation_tokens,
            "first_tokens": metrics.first_token.count,
            "first_token_seconds": round(metrics.first_token.sum, 4),
            "engine": engine,
        }
        return msgspec.json.encode(live)

    def _engine_seen_by(self, owner: str, snapshot: Snapshot) -> LiveEngine:
        self._seen[owner] = engine = live_engine(snapshot, self._engine.info.block_size, time.monotonic())
        for request in engine["requests"] if owner else ():
            if self._serving.requests.owner_of(request["id"]) != owner:
                digest = hashlib.blake2b(request["id"].encode(), key=_SECRET, digest_size=16)
                request["id"] = f"other-{digest.hexdigest()}"
        return engine

    async def watch(self, owner: str) -> AsyncGenerator[bytes, None]:
        """What the owner may see, as JSON, until the server ends."""
        while self._serving.drained_by is None and not self._engine.is_dead:
            yield await self.seen_by(owner)
            await asyncio.sleep(max(INTERVAL, self._kept_until - time.monotonic()))

    def events(self, live: bytes) -> bytes:
        return event(live)

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))


def live_engine(snapshot: Snapshot, block_size: int, now: float) -> LiveEngine:
    """`now` is of the monotonic clock."""
    stats, counters = snapshot.stats, snapshot.stats.counters
    requests: list[LiveRequest] = [
        {
            "id": one.request_id,
            "is_running": one.is_running,
            "age": round(now - one.timeline.queued, 3),
            "ttft": (first := one.timeline.first_token) and round(first - one.timeline.queued, 4),
            "prompt_tokens": one.num_prompt_tokens,
            "tokens": one.num_tokens,
            "computed_tokens": one.num_computed_tokens,
            "preemptions": one.timeline.num_preemptions,
            "recomputed_tokens": one.timeline.num_recomputed_tokens,
            "blocks": block_runs(one.block_ids),
        }
        for one in snapshot.requests
    ]
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "wait_cause": stats.wait_cause,
        "used_blocks": stats.num_used_blocks,
        "num_blocks": len(snapshot.blocks),
        "block_size": block_size,
        "step_seconds": round(stats.step_seconds, 6),
        "step_tokens": stats.step_tokens,
        "steps": counters.num_steps,
        "computed_tokens": counters.num_step_tokens,
        "recomputed_tokens": counters.num_recomputed_tokens,
        "preemptions": counters.num_preemptions,
        "prefix_queries": counters.num_prefix_queries,
        "prefix_hits": counters.num_prefix_hits,
        "requests": requests,
        "blocks": [number for run in _RUN.finditer(snapshot.blocks) for number in (run.end() - run.start(), run[1][0])],
    }


def block_runs(block_ids: Sequence[int]) -> list[int]:
    """First and length of each run of ids that rise by one; of zeros, which repeat."""
    runs: list[int] = []
    expected = -1
    for block_id in block_ids:
        if block_id == expected:
            runs[-1] += 1
        else:
            runs += (block_id, 1)
        expected = block_id + 1 if block_id else 0
    return runs


@router.get("/v1/engine/live", response_model=Live, responses=streamed(Live) | {503: {"model": ErrorResponse}})
async def engine_live(request: Request, serving: ServingOf) -> Response:
    """What the engine does now; as it changes, for those who accept events."""
    serving.check_alive()
    view: LiveView = request.app.state.live
    if EVENTS not in request.headers.get("accept", ""):
        return Response(await view.seen_by(current_owner()), media_type="application/json")
    if request.scope[METHOD] == "HEAD":
        return Response(media_type=EVENTS)
    return EventStream(view.watch(current_owner()), view)
