"""What happened to a request. Times are seconds since its arrival, unless something else is said."""

from typing import Literal

import msgspec


class PromptChunk(msgspec.Struct, frozen=True):
    """A step that computed several tokens of a choice."""

    at: float
    num_tokens: int
    num_step_tokens: int
    """Of all that shared the step, and how many did:"""
    num_step_requests: int


class ChoiceTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of one prompt. Times are null while the thing has not happened."""

    id: str
    """In the engine."""
    status: Literal["waiting", "running", "ended"]
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt."""
    num_output_tokens: int
    num_blocks: int | None
    """Of the KV cache, which it holds now."""
    queued: float
    admitted: float | None
    """Its first step began."""
    first_token: float | None
    ended: float | None
    chunks: list[PromptChunk]
    """The first of them, of"""
    num_chunks: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_decode_steps: int
    """Of the engine behind the first token, with"""
    mean_step_requests: float
    """requests in each on average."""
    time_per_output_token: float
    """Seconds between two tokens, on average."""


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """The X-Request-Id."""
    response_id: str | None
    method: str
    route: str
    model: str
    status: Literal["running", "ended"]
    http_status: int | None
    error: str | None
    """Code or type of the error that was the answer."""
    received_at: float
    """Seconds since 1970."""
    seconds: float
    """Until its end, or by now."""
    num_choices: int
    choices: list[ChoiceTimeline]
    """The first ones."""
    why: list[str]
    """Where the time went, in words."""
