"""Text that comes in pieces, read as if it were all there.

A reading is a generator that yields wherever it needs text that has not come yet, so parsers are written top down and
keep their place between pieces. Each character is looked at once, whatever the pieces are.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Wait: TypeAlias = Generator[None, None, Result]
Sink: TypeAlias = Callable[[str], object]
"""Takes the characters that are read."""

_SPACES = re.compile(r"\s+")


class Reader:
    """One answer's text."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._is_cut = False
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, *, cut: bool = False) -> None:
        """No more text will come; if `cut`, more was meant to."""
        self._ended, self._is_cut = True, cut

    @property
    def is_cut_here(self) -> bool:
        """Whether all has been read of a text that was cut."""
        return self._is_cut and self._at == len(self._text)

    def unread(self, text: str) -> None:
        """Let `text` be read once more."""
        self._text, self._at = text + self._text[self._at :], 0

    def hold(self) -> None:
        """From here on, remember what is read."""
        self._held = []

    def release(self) -> str:
        """What was read since `hold`, or nothing without one; it is forgotten."""
        held, self._held = self._held, None
        return "".join(held or ())

    def take(self, count: int = 1) -> str:
        """Read `count` characters that a look ahead has found."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._held is not None:
            self._held.append(taken)
        return taken

    def take_all(self) -> str:
        """Read what is here."""
        return self.take(len(self._text) - self._at)

    def peek(self) -> Wait[str]:
        """The next character, which stays unread; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def literal(self, *options: str) -> Wait[str]:
        """Read the option that comes next; "" when none does. Waits only while one still may.

        What a cut has left of one is read too.
        """
        found = yield from self.ahead(options)
        if not found and self._is_cut and self._begins(options):
            self.take_all()
        return self.take(len(found))

    def closing(self, *options: str) -> Wait[str]:
        """As `literal`, and the end of the text may cut the option short."""
        if found := (yield from self.literal(*options)):
            return found
        rest = self._text[self._at :]
        cut = self._ended and any(option.startswith(rest) for option in options)
        return self.take(len(rest)) if cut else ""

    def span(self, run: re.Pattern[str], sink: Sink) -> Wait[None]:
        """Read all characters of the class that `run` is a run of, as they come."""
        while True:
            if match := run.match(self._text, self._at):
                sink(self.take(match.end() - self._at))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def spaces(self) -> Wait[None]:
        yield from self.span(_SPACES, drop)

    def word(self, run: re.Pattern[str]) -> Wait[str]:
        """As `span`, in one piece."""
        pieces: list[str] = []
        yield from self.span(run, pieces.append)
        return "".join(pieces)

    def until(self, markers: tuple[str, ...], sink: Sink) -> Wait[str]:
        """Read up to the first marker, which stays unread and is returned; "" when there is none to the end.

        What can be no part of a marker goes to `sink` at once. No marker begins another. Of one that a cut has left
        in two, nothing is seen, unless it is a single letter, which may be anything.
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
                    self.take_all()
                    return ""
                sink(self.take())
            elif self._ended:
                return ""
            else:
                yield

    def _begins(self, markers: tuple[str, ...]) -> bool:
        """Whether what is left is the beginning of a marker."""
        rest = self._text[self._at :]
        return bool(rest) and any(marker.startswith(rest) for marker in markers)

    def ahead(self, options: tuple[str, ...]) -> Wait[str]:
        """The option that comes next, which stays unread; "" when none does."""
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    return option
            rest = self._text[self._at : self._at + max(map(len, options), default=0)]
            if self._ended or not any(option.startswith(rest) for option in options):
                return ""
            yield


def drop(text: str) -> None:
    """A sink."""


@lru_cache(maxsize=256)
def _first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("[" + "".join(re.escape(marker[0]) for marker in markers) + "]")
