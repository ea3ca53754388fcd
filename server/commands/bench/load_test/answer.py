"""One request and what came back: times, token counts, text."""

from dataclasses import dataclass, field
from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def read(self) -> tuple[str, bool]:
        """The visible text, and whether the event stands for tokens."""
        delta = self.delta
        if delta is None:
            text = self.text or ""
            return text, bool(text) or self.finish_reason is None
        text = delta.content or ""
        if text or delta.reasoning or delta.reasoning_content or delta.tool_calls:
            return text, True
        return text, delta.role is None and self.finish_reason is None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


class BadAnswer(Exception):
    """The server's own error in a stream, or an event that is none of the protocol's."""


@dataclass(slots=True)
class Answer:
    """Seconds by `time.perf_counter`. An event without text but with a finish reason ends the answer and is no token;
    neither is one that only names the role."""

    intended: float
    """When the request should have been sent: what latencies count from."""
    started: float = 0.0
    """When the client came to it. What lies between is the client's queue, or the client's lateness."""
    token_times: list[float] = field(default_factory=list)
    """Of the events that hold tokens."""
    end: float = 0.0
    """Of the last event with a choice, or of the failure."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    pieces: list[str] = field(default_factory=list)
    error: str | None = None
    _rest: bytes = b""

    def receive(self, data: bytes, now: float) -> None:
        """Server-sent events, however they are cut. Raises `BadAnswer`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload and payload != b"[DONE]":
                    self._read(payload, now)

    def _read(self, payload: bytes, now: float) -> None:
        try:
            event = _EVENTS.decode(payload)
        except msgspec.MsgspecError as error:
            raise BadAnswer(
                f"not an event of the protocol: {payload[:80].decode(errors='replace')} ({error})"
            ) from None
        if event.error is not None:
            raise BadAnswer(f"error within the stream: {error_text(payload)}")
        if event.choices:
            text, has_tokens = event.choices[0].read()
            self.end = now
            if has_tokens:
                self.token_times.append(now)
            if text:
                self.pieces.append(text)
        if event.usage is not None:
            self._count(event.usage)

    def _count(self, usage: _Usage) -> None:
        self.has_usage = usage.completion_tokens is not None
        self.output_tokens = usage.completion_tokens or 0
        self.prompt_tokens = usage.prompt_tokens or 0
        self.cached_tokens = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0

    def finish(self) -> None:
        """Settle what only the end tells. Raises `BadAnswer` for an answer without content."""
        if not self.end:
            raise BadAnswer("the answer has no choices: is it a stream of the protocol?")
        if not self.token_times:  # one token without text, as an end of sequence is
            self.token_times.append(self.end)
        if not self.has_usage:
            self.output_tokens = len(self.token_times)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.intended

    @property
    def e2el(self) -> float:
        return self.end - self.intended

    @property
    def tpot(self) -> float | None:
        """From the first token to the end, per token after the first; None for a single one."""
        return (self.end - self.token_times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Between events that hold tokens, one each as a rule."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


def error_text(body: bytes) -> str:
    """The message within an error's body, as OpenAI, or a plain `detail` or `message`, has it; else its beginning."""
    try:
        found = msgspec.json.decode(body)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and name in found:
                found = found[name]
    except msgspec.MsgspecError:
        found = body.decode(errors="replace")
    return " ".join(str(found).split())[:300]
