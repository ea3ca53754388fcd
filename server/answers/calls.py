"""Content with tool calls in it: what all styles share, and calls written in JSON or in Python."""

import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from server.answers.delta import AnswerReader
from server.answers.reader import JSON, NAME, PYTHON, Wait, drop, json_text, literal_as_json, unpacked

Functions: TypeAlias = Mapping[str, dict[str, Any]]
"""The names of the functions offered, and their parameters' JSON schemas."""

_BRACES = re.compile(r"\}+")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "type", "id", "function", *_ARGUMENTS}


def random_id() -> str:
    """An id of a call as OpenAI's are."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """An id of nine letters or digits; Mistral's templates take no others."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolStyle(NamedTuple):
    """One way of writing tool calls: how a template shows it, how calls are read, and how a grammar has them written.

    A grammar has calls written as in `call`, … being the arguments, and all of them together as in `calls`.
    """

    name: str
    sign: str
    """A regular expression for what a chat template holds that teaches the style."""
    parser: type["ToolParser"]
    opening: tuple[str, ...]
    """What nothing but calls begins with. Of these and `bare` none begins another."""
    call: str
    calls: str = "…"
    separator: str = ""
    """Between two calls."""
    trigger: str = ""
    """What free text may not hold without a call behind it; by default, the first call's beginning."""
    bare: tuple[str, ...] = ()
    """What calls may begin with, and ordinary text as well."""
    closing: tuple[str, ...] = ()
    """What ends the calls of one marker; it may be missing at the end of the answer."""
    arguments: Literal["json", "qwen_xml", "keywords"] = "json"
    make_id: Callable[[], str] = random_id

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be special tokens, so text for the parser has to keep those."""
        return self.opening + self.closing


class ToolParser:
    """Reads content with tool calls in it. What one call looks like is in the subclasses.

    Text becomes a call once its name and its arguments' beginning are there. A candidate that turns out to be none
    before that is content, character for character, or nothing where the end of a cut answer breaks it off; one that
    breaks off later stays the call that it was, with arguments as far as they came. Functions that nobody offered are
    called all the same where a marker shows that a call is meant; without one, they are content.
    """

    beginning: re.Pattern[str]
    """What a call behind another one begins with."""

    def __init__(self, answer: AnswerReader, style: ToolStyle, functions: Functions, *, only_calls: bool) -> None:
        """Read `answer`; `only_calls` says whether it cannot hold anything else, as a grammar may see to."""
        self.answer = answer
        self.style = style
        self.functions = functions
        self.only_calls = only_calls
        self.is_bare = False
        """Whether ordinary text may begin with the latest marker."""
        self.begun = False
        """Whether what is read is a call."""

    def read(self) -> Wait[None]:
        """Read the answer to its end."""
        answer, style = self.answer, self.style
        answer.expect_calls()
        while marker := (yield from answer.until(style.opening + style.bare, answer.say)):
            self.is_bare = marker in style.bare
            answer.hold()
            if not self.is_bare:
                answer.take(len(marker))
            if (yield from self._read_calls()):
                answer.release()
                continue
            yield from answer.peek()  # whether a cut answer ends here tells what was held
            rest = answer.release()
            if not (answer.is_cut_here and self._means_a_call(rest)):
                answer.say(rest)
        answer.end_content()

    def _means_a_call(self, text: str) -> bool:
        if self.only_calls or not self.is_bare:
            return True
        return '"name"' in text or any(name in text for name in self.functions)

    def _read_calls(self) -> Wait[bool]:
        """Read the calls behind a marker. Text held at the end was none, unless this returns True."""
        answer, closing = self.answer, self.style.closing
        in_list = yield from answer.token("[")
        while True:
            self.begun = False
            if not (yield from self.read_call()):
                return False
            answer.hold()
            yield from answer.token(",", ";")
            yield from answer.span(_BRACES, drop)  # one too many is a common slip
            yield from answer.spaces()
            in_brackets = bool(in_list and (yield from answer.literal("]")))
            if in_brackets and (self.is_bare or not closing):
                return True
            if in_brackets:
                yield from answer.spaces()
            if (yield from answer.literal(*closing, or_end=True)) or in_brackets:
                return True
            if not self.beginning.match((yield from answer.peek())):
                return False

    def read_call(self) -> Wait[bool]:
        """Read one call to its end. Returns False where there is none, or it breaks off."""
        raise NotImplementedError

    def is_offered(self, name: str) -> bool:
        """Whether a call of the function is meant as one."""
        return bool(name) and (not self.is_bare or name in self.functions)

    def add(self, name: str, arguments: str) -> None:
        """Add to the arguments of a call of the function, which begins with them."""
        if not self.begun:
            self.begun = True
            self.answer.begin_call(name)
        if arguments:
            self.answer.add_arguments(arguments)


class JsonToolParser(ToolParser):
    """Calls as JSON objects, `{"name": "f", "arguments": {…}}`, their keys in any order, alone or in a list.

    Of keys that come twice the first counts. An object may be within another one, as in OpenAI's
    `{"type": "function", "function": {…}}`.
    """

    beginning = re.compile(r"\{")
    _name: str | None
    _early: list[str] | None
    """Arguments that came before the name."""

    def read_call(self) -> Wait[bool]:
        """Read an object. Returns whether a call has begun; then it is over."""
        return (yield from self._read_object())

    def _read_object(self, is_inner: bool = False) -> Wait[bool]:
        answer = self.answer
        self._name = self._early = None
        more = yield from answer.token("{")
        while more:
            if (yield from answer.literal("}")):
                return self._begin("".join(self._early or ["{}"]))
            if not (yield from self._read_entry(is_inner)):
                break
            more = (yield from answer.token(",")) or (yield from answer.peek())
        return self.begun

    def _read_entry(self, is_inner: bool) -> Wait[bool]:
        answer = self.answer
        key = yield from self._read_string()
        colon = yield from answer.token(":")
        if not colon or not (self.begun or key in _KEYS):
            return False
        if self.begun:
            return (yield from answer.value(drop, JSON))
        if key == "function" and not is_inner and (yield from answer.peek()) == "{":
            return (yield from self._read_object(is_inner=True))
        if key in ("name", "function") and self._name is None:
            self._name = yield from self._read_string()
            return bool(self._name) and (self._early is None or self._begin("".join(self._early)))
        if key in _ARGUMENTS and self._early is None:
            return (yield from self._read_arguments())
        return (yield from answer.value(drop, JSON))

    def _read_arguments(self) -> Wait[bool]:
        """An object passes as it comes; null and "" mean none; an object's text within a string is unpacked."""
        answer = self.answer
        if (yield from answer.peek()) == "{":
            if self._name is not None:
                return self._begin("") and (yield from answer.value(answer.add_arguments, JSON))
            self._early = []
            return (yield from answer.value(self._early.append, JSON))
        if (text := unpacked((yield from answer.value_text(JSON)))) is None:
            return False
        self._early = [text or "{}"]
        return self._name is None or self._begin(self._early[0])

    def _read_string(self) -> Wait[str | None]:
        if (yield from self.answer.peek()) != '"':
            return None
        return unpacked((yield from self.answer.value_text(JSON)))

    def _begin(self, arguments: str) -> bool:
        """Begin the call, if it is one and has not begun, and return whether it has."""
        if not self.begun and self._name is not None and self.is_offered(self._name):
            self.add(self._name, arguments)
        return self.begun


class MistralToolParser(JsonToolParser):
    """`[TOOL_CALLS][{…}, {…}]`, or in newer models `[TOOL_CALLS]f[ARGS]{…}` for each."""

    def read_call(self) -> Wait[bool]:
        answer = self.answer
        name = yield from answer.word(NAME)
        if not name:
            return (yield from super().read_call())
        if (yield from answer.literal("[CALL_ID]")):
            yield from answer.word(NAME)
        yield from answer.literal("[ARGS]")
        yield from answer.spaces()
        if (yield from answer.peek()) != "{":
            return False
        self.add(name, "")
        yield from answer.value(answer.add_arguments, JSON)
        return True


class PythonToolParser(ToolParser):
    """Calls as Python writes them, `[get_weather(city="Paris", days=3), now()]`, with literals for keywords.

    An argument leaves when it is complete.
    """

    beginning = NAME

    def read_call(self) -> Wait[bool]:
        """Read a call, which begins with its first argument, or with its end when it has none."""
        answer = self.answer
        name = yield from answer.word(NAME)
        opened = yield from answer.literal("(")
        if not opened or not self.is_offered(name):
            return False
        yield from answer.spaces()
        while not (yield from answer.literal(")")):
            keyword = yield from answer.word(NAME)
            equals = yield from answer.token("=")
            literal = (yield from answer.value_text(PYTHON)) if keyword and equals else ""
            if not literal or not ((yield from answer.token(",")) or (yield from answer.peek()) == ")"):
                return False
            if (value := literal_as_json(literal)) is None:
                return False
            self.add(name, f"{', ' if self.begun else '{'}{json_text(keyword)}: {value}")
        self.add(name, "}" if self.begun else "{}")
        return True
