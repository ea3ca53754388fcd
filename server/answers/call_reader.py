"""`CallReader`: content with tool calls in it. What the calls look like is in its subclasses."""

from collections.abc import Mapping
from typing import Any

from server.answers.reader import Reader, Wait
from server.answers.writer import AnswerWriter


class CallReader:
    """Reads one answer.

    Text becomes a call once its name and its arguments' beginning are there. A candidate that turns out to be none
    before that is content, character for character, or nothing where the end of a cut answer breaks it off; one that
    breaks off later stays the call that it was, with arguments as far as they came. Functions that nobody offered are
    called all the same where a marker shows that a call is meant; without one, they are content.
    """

    markers: tuple[str, ...]
    """What calls begin with."""
    bare: tuple[str, ...] = ()
    """Those of the markers that ordinary text may hold as well."""
    only_calls = False
    """Whether the answer cannot hold anything else."""

    def __init__(self, reader: Reader, writer: AnswerWriter, functions: Mapping[str, dict[str, Any]]) -> None:
        """`functions` maps names to parameters' JSON schemas."""
        self.reader = reader
        self.writer = writer
        self.functions = functions

    def read(self) -> Wait[None]:
        self.writer.expect_calls()
        while marker := (yield from self.reader.until(self.markers, self.writer.say)):
            self.reader.hold()
            complete = yield from self.read_calls(marker)
            rest = self.reader.release()
            if not (complete or (self.reader.is_cut_here and self._means_a_call(marker, rest))):
                self.writer.say(rest)

    def _means_a_call(self, marker: str, text: str) -> bool:
        if self.only_calls or marker not in self.bare:
            return True
        return '"name"' in text or any(name in text for name in self.functions)

    def read_calls(self, marker: str) -> Wait[bool]:
        """Read the marker, and calls behind it. Text held at the end was none, unless this returns true."""
        raise NotImplementedError

    def is_offered(self, name: str, marker: str) -> bool:
        return bool(name) and (marker not in self.bare or name in self.functions)

    def begin(self, name: str) -> None:
        """What was held is a call."""
        self.reader.release()
        self.writer.begin_call(name)
