"""From the engine's snapshot to what is told of it."""

import re
from collections.abc import Sequence

from engine.messages import RequestSnapshot, Snapshot
from server.protocol.live import LiveEngine, LiveRequest

_RUN = re.compile(rb"(.)\1*", re.DOTALL)


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
