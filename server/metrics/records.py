"""What is known of a request while it runs and behind it: times and numbers, and no text of anybody's."""

import time
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec

from scheduler.timeline import Timeline

FAILED = ("abort", "error")
"""Finish reasons of choices whose times tell nothing of the server."""


class Phases(NamedTuple):
    """Seconds of a choice, which add up to what passed between its request's arrival and its last token."""

    prepare: float
    """Reading, templates, tokens; and waiting for an engine where there was none."""
    queue: float
    prefill: float
    """Until the first token, with the wait behind a preemption."""
    decode: float


class ChoiceRecord(msgspec.Struct, kw_only=True):
    """One continuation of one prompt. Times are seconds of the monotonic clock, None for what has not happened."""

    request_id: str
    """In the engine."""
    owner: str
    received: float
    """These two are those of the `RequestRecord`."""
    num_prompt_tokens: int
    max_tokens: int | None
    temperature: float
    top_p: float
    is_structured: bool
    timeline: Timeline
    """As the engine sent it last; before that it says only when the choice was queued."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """0 until it has ended."""
    first_token: float | None = None
    last_token: float | None = None
    """The tracker keeps it up to date only where it has to: it is right when the choice has ended."""
    ended: float | None = None
    finish_reason: str | None = None

    @property
    def admitted(self) -> float | None:
        """None while it waits. Where a token came without a timeline, it never waited."""
        return self.timeline.admitted or (None if self.first_token is None else self.timeline.queued)

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.received

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between two tokens of one that has ended; 0 where there were no two."""
        if self.first_token is None or self.last_token is None or self.num_output_tokens < 2:
            return 0.0
        return (self.last_token - self.first_token) / (self.num_output_tokens - 1)

    @property
    def is_counted(self) -> bool:
        """Whether its tokens count, now that it has ended: not where it failed before its prompt was computed."""
        return self.first_token is not None or self.finish_reason not in FAILED

    def phases(self, now: float) -> Phases:
        """Up to `now` where it has not ended."""
        queued, end = self.timeline.queued, now if self.ended is None else self.last_token or self.ended
        admitted = self.admitted or end
        first = self.first_token or end
        return Phases(queued - self.received, admitted - queued, first - admitted, end - first)


class RequestRecord(msgspec.Struct, eq=False):
    """One HTTP request."""

    received: float
    """On the monotonic clock."""
    received_at: float
    """Seconds since 1970."""
    method: str
    route: str = "other"
    """As it is registered, with its parameters in braces."""
    request_id: str = "-"
    """The X-Request-Id."""
    owner: str = ""
    """What stands for its API key; empty where the server has none."""
    response_id: str | None = None
    """The id in the answer's body."""
    claimed_id: str | None = None
    """The body's `request_id`, which no other request of this owner may have meanwhile."""
    n: int = 1
    """Choices per prompt."""
    has_body: bool = False
    """Whether it may bring a body, and so has a line in the log and a timeline."""
    status: int = 0
    """HTTP status of the answer; 0 while none was sent."""
    error: str | None = None
    """The code or type of the error that was the answer."""
    choices: list[ChoiceRecord] = []
    """The first MAX_CHOICES."""
    num_choices: int = 0
    num_open: int = 1
    """What is not over: the HTTP exchange, work in the background."""
    ended: float | None = None
    trace_context: dict[str, str] = {}
    """The headers `traceparent` and `tracestate`."""

    MAX_CHOICES = 64

    def add(self, choice: ChoiceRecord) -> None:
        self.num_choices += 1
        if len(self.choices) < self.MAX_CHOICES:
            self.choices.append(choice)

    def slowest(self) -> ChoiceRecord | None:
        """The choice that has not ended, or ended last."""
        return max(self.choices, key=lambda choice: choice.ended or float("inf"), default=None)

    def token_counts(self) -> dict[str, int]:
        """Of prompts, each counted once, and of all outputs."""
        prompts = self.choices[:: self.n]
        return {
            "prompt_tokens": sum(choice.num_prompt_tokens for choice in prompts),
            "cached_tokens": sum(choice.num_cached_tokens for choice in prompts),
            "output_tokens": sum(choice.num_output_tokens for choice in self.choices),
        }

    def log_fields(self, model: str) -> dict[str, Any]:
        """What its line in the log says: seconds of the slowest choice, and tokens of all."""
        assert self.ended is not None
        fields = {
            "request_id": self.request_id,
            "response_id": self.response_id,
            "model": model,
            "error": self.error,
            "e2e": round(self.ended - self.received, 4),
        }
        if (slowest := self.slowest()) is not None:
            ttft = slowest.time_to_first_token
            fields |= {
                "choices": self.num_choices,
                "finish_reason": slowest.finish_reason,
                **self.token_counts(),
                "queue": round(slowest.phases(self.ended).queue, 4),
                "ttft": None if ttft is None else round(ttft, 4),
                "itl": round(slowest.time_per_output_token, 5) or None,
                "preemptions": sum(choice.timeline.num_preemptions for choice in self.choices),
            }
        return {name: value for name, value in fields.items() if value is not None}

    def server_timing(self, now: float) -> bytes:
        """The header of that name, in milliseconds: https://www.w3.org/TR/server-timing/. Empty without choices."""
        slowest = self.slowest()
        if slowest is None:
            return b""
        entries = {**slowest.phases(now)._asdict(), "total": now - self.received, "ttft": slowest.time_to_first_token}
        known = (f"{name};dur={seconds * 1e3:.1f}" for name, seconds in entries.items() if seconds is not None)
        return ", ".join(known).encode()


CURRENT_REQUEST: ContextVar[RequestRecord] = ContextVar("request_record")
"""The request that is being answered."""


def current_request_id() -> str:
    """The X-Request-Id of the current request; `-` outside of any."""
    record = CURRENT_REQUEST.get(None)
    return record.request_id if record else "-"


def current_owner() -> str:
    """The owner of the current request: what it makes and finds belongs to this owner."""
    return CURRENT_REQUEST.get().owner


def note_response(response_id: str, n: int = 1) -> None:
    """The current request is answered under this id, with `n` choices per prompt."""
    record = CURRENT_REQUEST.get()
    record.response_id, record.n = response_id, n


def current_phases() -> Phases:
    """Of the slowest choice of the current request, up to now where it runs."""
    choice = CURRENT_REQUEST.get().slowest()
    return choice.phases(time.monotonic()) if choice else Phases(0, 0, 0, 0)
