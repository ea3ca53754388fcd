"""What the engine does at one moment. Times are seconds; requests are told by their ids alone."""

import msgspec

from engine.supervisor import Status


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    is_running: bool
    age: float
    """Since it came."""
    ttft: float | None
    """From its coming to its first token."""
    prompt_tokens: int
    tokens: int
    """Of prompt and output."""
    computed_tokens: int
    """Of `tokens`, those whose KV is in the blocks."""
    preemptions: int
    recomputed_tokens: int
    blocks: list[int]
    """Runs of block numbers in order of position: first, length, first, length, … Runs that begin with 0 stand for
    places that a sliding window has left."""


class LiveEngine(msgspec.Struct, frozen=True, kw_only=True):
    running: int
    waiting: int
    wait_cause: str | None
    """What those who wait have too little of: blocks, seats (requests in a step), tokens (of a step)."""
    used_blocks: int
    num_blocks: int
    """The reserved block 0 included."""
    block_size: int
    """Tokens."""
    step_seconds: float
    step_tokens: int
    """Of the newest step."""
    steps: int
    """This and the counts below are since the start of the engine."""
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


class Live(msgspec.Struct, frozen=True, kw_only=True):
    time: float
    """Of the server's monotonic clock."""
    status: Status
    reason: str
    """Where the status is not `ok`, or there is no `engine`."""
    output_tokens: int
    """This and the two below are since the start of the server."""
    first_tokens: int
    """Requests that have got one, each choice for itself, and"""
    first_token_seconds: float
    """the time from their coming until then, summed."""
    engine: LiveEngine | None
    """Null while it cannot tell."""
