"""Calls as JSON objects: `{"name": "f", "arguments": {…}}`, bare, between markers, or in a list."""

import re
from collections.abc import Callable

from server.answers.call_reader import CallReader
from server.answers.reader import Reader, Wait, drop
from server.answers.values import JSON, copy_string, copy_value, json_value

_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "type", "id", "function", *_ARGUMENTS}
_BRACES = re.compile(r"\}+")
_NAME = re.compile(r"[\w.-]+")


class JsonCalls(CallReader):
    closing: tuple[str, ...] = ()
    """What ends the calls of one marker; it may be missing at the end of the answer."""

    def read_calls(self, marker: str) -> Wait[bool]:
        reader = self.reader
        if marker not in self.bare:
            reader.take(len(marker))
        yield from reader.spaces()
        in_list = bool((yield from reader.literal("[")))
        yield from reader.spaces()
        while (yield from self.read_call(marker)):
            reader.hold()
            yield from reader.spaces()
            yield from reader.literal(",", ";")
            yield from reader.spaces()
            if (yield from reader.peek()) != "{":
                return (yield from self._read_closing(in_list))
        return False

    def read_call(self, marker: str) -> Wait[bool]:
        """Whether a call has begun; then it is over."""
        return (yield from _Object(self.reader, self._beginner(marker), self.writer.add_arguments).read())

    def _beginner(self, marker: str) -> Callable[[str], bool]:
        def begin(name: str) -> bool:
            if offered := self.is_offered(name, marker):
                self.begin(name)
            return offered

        return begin

    def _read_closing(self, in_list: bool) -> Wait[bool]:
        reader = self.reader
        yield from reader.span(_BRACES, drop)  # one too many is a common slip
        yield from reader.spaces()
        bracket = in_list and (yield from reader.literal("]"))
        if bracket and self.closing:
            yield from reader.spaces()
        return bool((yield from reader.closing(*self.closing)) or bracket)


class HermesCalls(JsonCalls):
    """`<tool_call>{…}</tool_call>`: Hermes, Qwen and many others."""

    markers: tuple[str, ...] = ("<tool_call>",)
    closing = ("</tool_call>",)


class LlamaCalls(JsonCalls):
    """The answer is an object, or several with semicolons between, or a list of them."""

    markers = ("<|python_tag|>", "{", "[")
    bare = ("{", "[")


class MistralCalls(JsonCalls):
    """`[TOOL_CALLS][{…}, {…}]`, or in newer models `[TOOL_CALLS]f[ARGS]{…}` for each."""

    markers = ("[TOOL_CALLS]",)

    def read_call(self, marker: str) -> Wait[bool]:
        reader = self.reader
        name = yield from reader.word(_NAME)
        if not name:
            return (yield from super().read_call(marker))
        if (yield from reader.literal("[CALL_ID]")):
            yield from reader.word(_NAME)
        yield from reader.literal("[ARGS]")
        yield from reader.spaces()
        if (yield from reader.peek()) != "{":
            return False
        self.begin(name)
        yield from copy_value(reader, self.writer.add_arguments, JSON)
        return True


class _Object:
    """One call's object, keys in any order. Of keys that come twice the first counts.

    It may be within another one, as in OpenAI's `{"type": "function", "function": {…}}`.
    """

    def __init__(
        self,
        reader: Reader,
        begin: Callable[[str], bool],
        add_arguments: Callable[[str], None],
        *,
        is_inner: bool = False,
    ) -> None:
        """`begin` may refuse a name."""
        self.is_inner = is_inner
        self.reader = reader
        self.begin = begin
        self.add_arguments = add_arguments
        self.name: str | None = None
        self.early: list[str] | None = None
        """Arguments that came before the name."""
        self.begun = False

    def read(self) -> Wait[bool]:
        """Whether a call has begun."""
        reader = self.reader
        more = yield from reader.literal("{")
        while more:
            yield from reader.spaces()
            if (yield from reader.literal("}")):
                self._begin_with("".join(self.early or ["{}"]))
                break
            if not (yield from self._read_entry()):
                break
            yield from reader.spaces()
            more = (yield from reader.literal(",")) or (yield from reader.peek()).replace("}", "more")
        return self.begun

    def _read_entry(self) -> Wait[bool]:
        reader = self.reader
        key = yield from self._read_string()
        yield from reader.spaces()
        colon = yield from reader.literal(":")
        yield from reader.spaces()
        if not colon or not (self.begun or key in _KEYS):
            return False
        if key == "function" and not (self.begun or self.is_inner) and (yield from reader.peek()) == "{":
            inner = _Object(reader, self.begin, self.add_arguments, is_inner=True)
            self.begun = yield from inner.read()
            return self.begun
        if key in ("name", "function") and self.name is None and not self.begun:
            self.name = yield from self._read_string()
            return bool(self.name) and (self.early is None or self._begin_with("".join(self.early)))
        if key in _ARGUMENTS and self.early is None and not self.begun:
            return (yield from self._read_arguments())
        return (yield from copy_value(reader, drop, JSON))

    def _read_arguments(self) -> Wait[bool]:
        """An object passes as it comes; null and "" mean none; an object's text within a string is unpacked."""
        if (yield from self.reader.peek()) == "{":
            if self.name is not None:
                return self._begin_with("") and (yield from copy_value(self.reader, self.add_arguments, JSON))
            self.early = []
            return (yield from copy_value(self.reader, self.early.append, JSON))
        raw: list[str] = []
        yield from copy_value(self.reader, raw.append, JSON)
        text = "".join(raw)
        try:
            value = json_value(text)
        except ValueError:
            return False
        arguments = value if isinstance(value, str) else "" if value is None else text
        self.early = [arguments or "{}"]
        return self.name is None or self._begin_with(self.early[0])

    def _read_string(self) -> Wait[str | None]:
        raw: list[str] = []
        if (yield from self.reader.peek()) == '"':
            yield from copy_string(self.reader, raw.append, JSON)
        try:
            return str(json_value("".join(raw)))
        except ValueError:
            return None

    def _begin_with(self, arguments: str) -> bool:
        if not self.begun and self.name is not None and self.begin(self.name):
            self.begun = True
            if arguments:
                self.add_arguments(arguments)
        return self.begun
