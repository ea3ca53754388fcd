"""From the engine's snapshot to what is told of it."""

import hashlib
import os
import re
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from engine.messages import RequestSnapshot, Snapshot
from server.protocol.live import Live, LiveEngine, LiveRequest

_SECRET = os.urandom(32)
_RUN = re.compile(rb"(.)\1*", re.DOTALL)


class Frame:
    """One look at the engine, as each key's owner may see it: requests of others have other names, the same ones in
    all frames, from which theirs cannot be told."""

    def __init__(self, live: Live, owner_of: Callable[[str], str | None]) -> None:
        self._live = live
        self._owner_of = owner_of
        self._encoded: dict[str, bytes] = {}

    def seen_by(self, owner: str) -> bytes:
        """JSON of a `Live`. Without keys, whose owner is empty, everybody sees all."""
        if owner not in self._encoded:
            self._encoded[owner] = msgspec.json.encode(self._masked(owner) if owner else self._live)
        return self._encoded[owner]

    def _masked(self, owner: str) -> Live:
        engine = self._live.engine
        if engine is None:
            return self._live
        requests = [
            one if self._owner_of(one.id) == owner else replace(one, id=_other_name(one.id)) for one in engine.requests
        ]
        return replace(self._live, engine=replace(engine, requests=requests))


def _other_name(request_id: str) -> str:
    return "other-" + hashlib.blake2b(request_id.encode(), key=_SECRET, digest_size=16).hexdigest()


def live_engine(snapshot: Snapshot, block_size: int, now: float) -> LiveEngine:
    """`now` is of the monotonic clock."""
    stats, counters = snapshot.stats, snapshot.stats.counters
    return LiveEngine(
        running=stats.num_running,
        waiting=stats.num_waiting,
        wait_cause=stats.wait_cause,
        used_blocks=stats.num_used_blocks,
        num_blocks=len(snapshot.blocks),
        block_size=block_size,
        step_seconds=round(stats.step_seconds, 6),
        step_tokens=stats.step_tokens,
        steps=counters.num_steps,
        computed_tokens=counters.num_step_tokens,
        recomputed_tokens=counters.num_recomputed_tokens,
        preemptions=counters.num_preemptions,
        prefix_queries=counters.num_prefix_queries,
        prefix_hits=counters.num_prefix_hits,
        requests=[_live_request(request, now) for request in snapshot.requests],
        blocks=equal_runs(snapshot.blocks),
    )


def _live_request(request: RequestSnapshot, now: float) -> LiveRequest:
    timeline = request.timeline
    first = timeline.first_token
    return LiveRequest(
        id=request.request_id,
        is_running=request.is_running,
        age=round(now - timeline.queued, 3),
        ttft=None if first is None else round(first - timeline.queued, 4),
        prompt_tokens=request.num_prompt_tokens,
        tokens=request.num_tokens,
        computed_tokens=request.num_computed_tokens,
        preemptions=timeline.num_preemptions,
        recomputed_tokens=timeline.num_recomputed_tokens,
        blocks=block_runs(request.block_ids),
    )


def equal_runs(states: bytes) -> list[int]:
    """Length and value of each run of equal bytes."""
    runs: list[int] = []
    for match in _RUN.finditer(states):
        runs += (match.end() - match.start(), match[1][0])
    return runs


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
