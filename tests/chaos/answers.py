"""What a client has got: the same form for whole answers and for streams, of every route."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

WORDS = {
    "the engine has stopped": "engine_dead",
    "the engine is being started": "engine_restarting",
    "no sign of life": "engine_frozen",
    "wait already": "queue_full",
}
"""Of error messages, where a protocol tells no code."""


class Violation(Exception):
    """The server has broken a promise."""


@dataclass
class Choice:
    """What has come of one choice."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    tokens: list[str] = field(default_factory=list)
    """Those that log-probabilities were given for."""
    logprobs: list[float | None] = field(default_factory=list)

    def add(self, text: str, finish_reason: str | None = None, stop_reason: int | str | None = None) -> None:
        """A piece. Raises `Violation` where none may come."""
        if self.finish_reason is not None:
            raise Violation(f"behind the choice's end: {text!r}, {finish_reason}")
        self.text += text
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason


@dataclass
class Answer:
    status: int = 0
    """0 until there is one."""
    headers: dict[str, str] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    counts: tuple[int, int] | None = None
    """Tokens of prompts and output."""
    embeddings: list[list[float]] | None = None
    id: str | None = None
    error: dict[str, Any] | None = None
    is_whole: bool = False
    """The server has said that this is all."""

    def choice(self, index: int = 0) -> Choice:
        return self.choices.setdefault(index, Choice())

    @property
    def error_code(self) -> str | None:
        if self.error is None:
            return None
        by_words = (code for words, code in WORDS.items() if words in self.error["message"])
        return next(by_words, self.error.get("code"))


class Events:
    """Cuts the pieces of a stream into the texts of its events, or into lines."""

    def __init__(self, end: bytes) -> None:
        self.end = end
        self.rest = b""

    def push(self, piece: bytes) -> Iterator[bytes]:
        *events, self.rest = (self.rest + piece).split(self.end)
        return (event.rpartition(b"data: ")[2] for event in events)
