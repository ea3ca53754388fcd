"""Text that comes in pieces, read as if it were all there.

A reading is a generator that yields wherever it needs text that has not come yet, so parsers are written top down and
keep their place between pieces. Each character is looked at once, whatever the pieces are.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

import msgspec

Result = TypeVar("Result")
Wait: TypeAlias = Generator[None, None, Result]
Sink: TypeAlias = Callable[[str], object]
"""Takes the characters that are read."""

JSON, PYTHON = '"', "\"'"
"""Notations of values, by the quotes around their strings."""
_PLAIN = {JSON: re.compile(r'[^"{}\[\]]+'), PYTHON: re.compile(r"""[^"'{}\[\]()]+""")}
"""Runs of characters that are neither quotes nor brackets."""
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_WORD = re.compile(r"[\w.+-]+")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SPACES = re.compile(r"\s+")


class Reader:
    """One text, which is read from its beginning to its end. Subclasses add the pieces."""

    def __init__(self) -> None:
        self._text = ""  # the latest piece, and what was not read of those before
        self._at = 0  # characters of it that have been read
        self._ended = False  # no more will come
        self._is_cut = False  # more was meant to come
        self._held: list[str] | None = None

    @property
    def is_cut_here(self) -> bool:
        """Whether all has been read of a text that was cut."""
        return self._is_cut and self._at == len(self._text)

    def unread(self, text: str) -> None:
        """Let `text` be read once more."""
        self._text, self._at = text + self._text[self._at :], 0

    def hold(self) -> None:
        """Remember what is read from here on."""
        self._held = []

    def release(self) -> str:
        """Return what was read since `hold`, or nothing without one, and forget it."""
        held, self._held = self._held, None
        return "".join(held or ())

    def take(self, count: int = 1) -> str:
        """Read `count` characters, or as many of them as are here."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._held is not None:
            self._held.append(taken)
        return taken

    def peek(self) -> Wait[str]:
        """Return the next character, which stays unread, or "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def ahead(self, options: tuple[str, ...]) -> Wait[str]:
        """Return the option that comes next, which stays unread, or "". Waits only while one still may come."""
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    return option
            if self._ended or not self._begins(options):
                return ""
            yield

    def literal(self, *options: str, or_end: bool = False) -> Wait[str]:
        """Read and return the option that comes next; "" when none does. Waits only while one still may come.

        With `or_end` the end of the text may cut the option short. What a cut has left of one is read, but not found.
        """
        found = yield from self.ahead(options)
        if not found and (self._is_cut or (or_end and self._ended)) and self._begins(options):
            rest = self.take(len(self._text))
            return "" if self._is_cut else rest
        return self.take(len(found))

    def span(self, run: re.Pattern[str], sink: Sink) -> Wait[None]:
        """Read all characters of the class that `run` is a run of, as they come."""
        while True:
            if match := run.match(self._text, self._at):
                sink(self.take(match.end() - self._at))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def spaces(self) -> Wait[None]:
        """Read white space."""
        yield from self.span(_SPACES, drop)

    def token(self, *options: str) -> Wait[str]:
        """Read and return the option that comes next, as `literal` does, and the white space around it."""
        yield from self.spaces()
        found = yield from self.literal(*options)
        yield from self.spaces()
        return found

    def word(self, run: re.Pattern[str] = _WORD) -> Wait[str]:
        """Read as `span` does, and return it in one piece."""
        pieces: list[str] = []
        yield from self.span(run, pieces.append)
        return "".join(pieces)

    def until(self, markers: tuple[str, ...], sink: Sink) -> Wait[str]:
        """Read up to the first marker, which stays unread and is returned; "" when there is none to the end.

        What can be no part of a marker goes to `sink` at once. No marker begins another. One that a cut has left in
        two is dropped, unless a single letter is left of it, which may be anything.
        """
        first = _first_characters(markers)
        while True:
            match = first.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if end > self._at:
                sink(self.take(end - self._at))
            if match:
                if found := (yield from self.ahead(markers)):
                    return found
                if self._is_cut and len(self._text) - self._at > 1 and self._begins(markers):
                    self.take(len(self._text))
                    return ""
                sink(self.take())
            elif self._ended:
                return ""
            else:
                yield

    def _begins(self, markers: tuple[str, ...]) -> bool:
        """Whether what is left, which may be nothing, is the beginning of a marker."""
        rest = self._text[self._at : self._at + max(map(len, markers), default=0)]
        return any(marker.startswith(rest) for marker in markers)

    def value(self, sink: Sink, quotes: str = JSON) -> Wait[bool]:
        """Read one value: a string, something in brackets, or a word.

        Returns False where the text ends within it or cannot go on so.
        """
        closing: list[str] = []
        while True:
            character = yield from self.peek()
            if character and character in quotes:
                if not (yield from self._string(sink, quotes)):
                    return False
            elif character in _CLOSING:
                closing.append(_CLOSING[character])
                sink(self.take())
            elif not closing:
                word = yield from self.word()
                sink(word)
                return bool(word)
            elif character == closing.pop():
                sink(self.take())
            else:
                return False
            if not closing:
                return True
            yield from self.span(_PLAIN[quotes], sink)

    def value_text(self, quotes: str = JSON) -> Wait[str]:
        """Read one value and return its text, or "" where it breaks off."""
        pieces: list[str] = []
        return "".join(pieces) if (yield from self.value(pieces.append, quotes)) else ""

    def _string(self, sink: Sink, quotes: str) -> Wait[bool]:
        """Read a string with its quotes. Raw control characters, which JSON forbids in strings, are escaped there."""
        quote = self.take()
        if quotes == PYTHON:
            quote += yield from self.literal(quote * 2)
            if len(quote) == 1 and (yield from self.literal(quote)):
                sink(quote * 2)
                return True
        inner = sink if quotes == PYTHON else lambda text: sink(_CONTROL.sub(_escape, text))
        sink(quote)
        while mark := (yield from self.until((quote, "\\"), inner)):
            sink(self.take(len(mark)))
            if mark == quote:
                return True
            yield from self.peek()
            sink(self.take())
        return False


def drop(text: str) -> None:
    """A sink that keeps nothing."""


@lru_cache(maxsize=256)
def _first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("[" + re.escape("".join(marker[0] for marker in markers)) + "]")


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def json_text(value: Any) -> str:
    """JSON text with other characters than ASCII's as they are, as models write it."""
    return json.dumps(value, ensure_ascii=False)


def literal_as_json(text: str) -> str | None:
    """JSON text for a literal of JSON, in which control characters may be raw, or of Python; None for anything else."""
    with suppress(ValueError, RecursionError):
        msgspec.json.decode(text)
        return text
    evaluations: tuple[Callable[[str], Any], ...] = (partial(json.loads, strict=False), ast.literal_eval)
    for evaluate in evaluations:
        with warnings.catch_warnings(), suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            warnings.simplefilter("ignore")  # unknown escapes in the model's strings
            converted = json.dumps(evaluate(text), ensure_ascii=False, allow_nan=False)
            converted.encode()
            return converted
    return None
