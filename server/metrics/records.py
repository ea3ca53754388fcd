"""What is known of a request, from its head to its end: times and numbers, and no text of anybody's."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.messages import AddRequest
from scheduler.timeline import Timeline

FAILED = ("abort", "error")
"""Finish reasons of choices whose times tell nothing of the server."""


class Phases(NamedTuple):
    """Seconds of a choice, which add up to what passed between its request and its last token."""

    prepare: float
    """Reading, templates, tokens; and waiting for an engine where there was none."""
    queue: float
    prefill: float
    """Until the first token, with the wait behind a preemption."""
    decode: float


@dataclass(slots=True)
class Choice:
    """One continuation of one prompt. Times are seconds of the monotonic clock."""

    request_id: str
    received: float
    began: float
    num_prompt_tokens: int
    max_tokens: int | None
    temperature: float
    top_p: float
    is_structured: bool
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """Known when it has ended."""
    first_token: float | None = None
    last_token: float | None = None
    """Known when it has ended."""
    ended: float | None = None
    finish_reason: str | None = None
    timeline: Timeline | None = None
    """As the engine told it last."""
    owner: str = ""
    """The owner of the request, see `RequestRecord`."""

    @classmethod
    def of(cls, request: AddRequest, record: "RequestRecord | None", now: float) -> "Choice":
        params = request.sampling_params
        return cls(
            request_id=request.request_id,
            owner=record.owner if record else "",
            received=record.received if record else now,
            began=now,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            is_structured=params.structured is not None,
        )

    @property
    def queued(self) -> float:
        return self.began if self.timeline is None else self.timeline.queued

    @property
    def admitted(self) -> float | None:
        """None while it waits. Who has a token but no timeline never did."""
        if self.timeline is not None:
            return self.timeline.admitted
        return None if self.first_token is None else self.began

    def phases(self, now: float) -> Phases:
        """Up to `now` for one that runs."""
        end = self.last_token or self.ended or now
        admitted = self.admitted or end
        first = self.first_token or end
        return Phases(self.queued - self.received, admitted - self.queued, first - admitted, end - first)

    @property
    def is_counted(self) -> bool:
        """Whether the tokens of a choice that has ended count; not where it failed before its prompt was computed."""
        return self.first_token is not None or self.finish_reason not in FAILED

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between two tokens; 0 where there were no two."""
        if self.first_token is None or self.last_token is None or self.num_output_tokens < 2:
            return 0.0
        return (self.last_token - self.first_token) / (self.num_output_tokens - 1)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request."""

    received: float
    """On the monotonic clock."""
    received_at: float
    """By the calendar."""
    method: str
    route: str = "other"
    """As it is registered, with its parameters in braces."""
    name: str = "-"
    """The X-Request-Id."""
    owner: str = ""
    """What stands for its API key; empty where the server has none."""
    response_id: str | None = None
    """Of the answer."""
    claimed_id: str | None = None
    """The body's `request_id`, which no other request of this owner may have meanwhile."""
    n: int = 1
    """Choices per prompt."""
    is_work: bool = False
    """Whether it has a body, and so a line in the log and a timeline."""
    status: int = 0
    """Of the answer's head; 0: none was sent."""
    error: str | None = None
    """The code or type of the error that was the answer."""
    choices: list[Choice] = field(default_factory=list)
    """The first ones, see `MAX_CHOICES`."""
    num_choices: int = 0
    num_holders: int = 1
    """What is not over: the HTTP exchange, work in the background."""
    ended: float | None = None
    trace_context: dict[str, str] = field(default_factory=dict)
    """The headers `traceparent` and `tracestate`."""

    MAX_CHOICES = 64

    def add(self, choice: Choice) -> None:
        self.num_choices += 1
        if len(self.choices) < self.MAX_CHOICES:
            self.choices.append(choice)

    def slowest(self) -> Choice | None:
        """The choice that is not over, or that was last."""
        return max(self.choices, key=lambda choice: choice.ended or float("inf"), default=None)


CURRENT: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
"""Of the request that is being answered."""


def current_owner() -> str:
    """The owner of the request that is being answered: what the request makes and finds is this owner's."""
    record = CURRENT.get()
    return record.owner if record else ""


def note_response(response_id: str, n: int | None = None) -> None:
    """The current request is answered under this id, with `n` choices per prompt."""
    if record := CURRENT.get():
        record.response_id, record.n = response_id, n or record.n


def server_timing(record: RequestRecord, now: float) -> bytes:
    """The header of that name, in milliseconds: https://www.w3.org/TR/server-timing/"""
    slowest = record.slowest()
    if slowest is None:
        return b""
    phases = slowest.phases(now)
    entries = {**phases._asdict(), "total": now - record.received}
    if slowest.first_token is not None:
        entries["ttft"] = slowest.first_token - record.received
    return ", ".join(f"{name};dur={seconds * 1e3:.1f}" for name, seconds in entries.items()).encode()
