"""What an engine with given requests would say of itself."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from engine.messages import RequestSnapshot, Snapshot, StepStats
from scheduler.block_pool import FREE_CACHED
from scheduler.timeline import Counters, Timeline

BLOCK_SIZE = 16
"""FakeEngine's."""


def request(
    name: str, blocks: list[int], *, prompt: int = 16, computed: int | None = None, preempted: int = 0
) -> RequestSnapshot:
    """Waits if it has no blocks; else they are full unless it has `computed` fewer tokens."""
    tokens = len(blocks) * BLOCK_SIZE if computed is None else computed
    timeline = Timeline(queued=0.0, first_token=0.5, num_preemptions=preempted)
    return RequestSnapshot(name, bool(blocks), prompt, max(prompt, tokens) + 1, tokens, blocks, timeline)


def scene(*requests: RequestSnapshot, num_blocks: int = 33, cached: Collection[int] = (), **counters: int) -> Snapshot:
    holders = Counter(block for one in requests for block in one.block_ids if block)
    states = bytes(holders[block] or (FREE_CACHED if block in cached else 0) for block in range(num_blocks))
    numbers: dict[str, Any] = {
        "num_running": sum(one.is_running for one in requests),
        "num_waiting": sum(not one.is_running for one in requests),
        "num_used_blocks": len(holders),
    }
    cause = "blocks" if numbers["num_waiting"] else None
    stats = StepStats(
        time=0.0, step_seconds=0.01, step_tokens=1, wait_cause=cause, counters=Counters(**counters), **numbers
    )
    return Snapshot(stats, list(requests), states)
