"""Tool calls in JSON, in Python and in elements, read one at a time.

Each function here reads one call and returns whether it has come to its end. Text becomes a call once its name and its
arguments' beginning are there; one that breaks off later stays the call that it was, with arguments as far as they
came. Functions that nobody offered are called all the same where a marker shows that a call is meant.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from server.answers.delta import DeltaMessage, DeltaToolCall
from server.answers.reader import PYTHON, Reader, Sink, Wait, drop, json_text, literal_as_json

Functions: TypeAlias = Mapping[str, dict[str, Any]]
"""The names of the functions offered, and their parameters' JSON schemas."""
Kind = TypeVar("Kind", dict[str, Any], list[Any])

_NAME = re.compile(r"[\w.-]+")
"""What names of functions consist of where nothing else delimits them."""
_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "type", "id", "function", *_ARGUMENTS}


class AnswerReader(Reader):
    """The reader of one answer, and the delta that is made of what it has read."""

    def __init__(self, functions: Functions, make_id: Callable[[], str]) -> None:
        super().__init__()
        self.functions = functions
        self.num_calls = 0
        self.is_bare = False
        """Whether ordinary text may begin with the latest marker: then only functions offered are called."""
        self.begun = False
        """Whether what is read is a call."""
        self._make_id = make_id
        self._delta = DeltaMessage()
        self._spaces: list[str] | None = None
        """White space that is content if more content follows, and nothing if a call does; None within content, and
        where there are no calls."""

    def think(self, text: str) -> None:
        """Add reasoning."""
        self._delta.reasoning += text

    def say(self, text: str) -> None:
        """Add content."""
        if self._spaces is not None:
            self._spaces.append(text)
            if not text or text.isspace():
                return
            text, self._spaces = "".join(self._spaces), None
        self._delta.content += text

    def is_function(self, name: str) -> bool:
        """Whether a call of the function is meant as one."""
        return bool(name) and (not self.is_bare or name in self.functions)

    def begin_call(self, name: str, arguments: str = "") -> bool:
        """Add a call, which is what was held, unless it has begun or is none; returns whether it has begun."""
        if not self.begun and self.is_function(name):
            self.begun = True
            self.release()
            self._delta.tool_calls.append(DeltaToolCall(self.num_calls, self._make_id(), name, arguments))
            self.num_calls += 1
            self._spaces = []
        return self.begun

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the latest call."""
        if not self._delta.tool_calls:
            self._delta.tool_calls.append(DeltaToolCall(self.num_calls - 1))
        self._delta.tool_calls[-1].arguments += text

    def add(self, name: str, arguments: str) -> None:
        """Add to the arguments of a call of the function, which begins with them."""
        if self.begun:
            self.add_arguments(arguments)
        else:
            self.begin_call(name, arguments)


def read_object(answer: AnswerReader, is_inner: bool = False) -> Wait[bool]:
    """Read `{"name": "f", "arguments": {…}}`, its keys in any order, of those that come twice the first.

    An object may be within another one, as in OpenAI's `{"type": "function", "function": {…}}`. Arguments that are an
    object pass as they come; null and "" mean none; an object's text within a string is unpacked.
    """
    name: str | None = None
    arguments: str | None = None  # that came before the name
    more = yield from answer.token("{")
    while more:
        if (yield from answer.literal("}")):
            return answer.begin_call(name or "", arguments or "{}")
        key = yield from _read_string(answer)
        if not (yield from answer.token(":")) or not (answer.begun or key in _KEYS):
            break
        is_object = (yield from answer.peek()) == "{"
        if answer.begun:
            is_whole = yield from answer.value(drop)
        elif key == "function" and is_object and not is_inner:
            is_whole = yield from read_object(answer, is_inner=True)
        elif key in ("name", "function") and name is None:
            name = yield from _read_string(answer)
            is_whole = bool(name) and (arguments is None or answer.begin_call(name or "", arguments or "{}"))
        elif key in _ARGUMENTS and name and is_object and arguments is None:
            is_whole = answer.begin_call(name) and (yield from answer.value(answer.add_arguments))
        elif key in _ARGUMENTS and arguments is None:
            text = yield from answer.value_text()
            arguments = (text or None) if is_object else _unpacked(text)
            is_whole = arguments is not None and (name is None or answer.begin_call(name, arguments or "{}"))
        else:
            is_whole = yield from answer.value(drop)
        if not is_whole:
            break
        more = (yield from answer.token(",")) or (yield from answer.peek())
    return answer.begun


def _read_string(answer: AnswerReader) -> Wait[str | None]:
    return _unpacked((yield from answer.value_text())) if (yield from answer.peek()) == '"' else None


def _unpacked(text: str) -> str | None:
    """A JSON string's content, "" for null, any other value's text, and None for what is no JSON or no UTF-8."""
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else "" if value is None else text


def read_named(answer: AnswerReader) -> Wait[bool]:
    """Read `f[ARGS]{…}`, as newer models of Mistral write behind each `[TOOL_CALLS]`, or an object."""
    name = yield from answer.word(_NAME)
    if not name:
        return (yield from read_object(answer))
    if (yield from answer.literal("[CALL_ID]")):
        yield from answer.word(_NAME)
    yield from answer.literal("[ARGS]")
    yield from answer.spaces()
    if (yield from answer.peek()) != "{":
        return False
    answer.begin_call(name)
    yield from answer.value(answer.add_arguments)
    return True


def read_keywords(answer: AnswerReader) -> Wait[bool]:
    """Read `get_weather(city="Paris", days=3)`, with literals for keywords; each leaves when it is complete."""
    name = yield from answer.word(_NAME)
    if not (yield from answer.literal("(")) or not answer.is_function(name):
        return False
    yield from answer.spaces()
    while not (yield from answer.literal(")")):
        keyword = yield from answer.word(_NAME)
        equals = yield from answer.token("=")
        literal = (yield from answer.value_text(PYTHON)) if keyword and equals else ""
        if not literal or not ((yield from answer.token(",")) or (yield from answer.peek()) == ")"):
            return False
        if (value := literal_as_json(literal)) is None:
            return False
        answer.add(name, f"{', ' if answer.begun else '{'}{json_text(keyword)}: {value}")
    answer.add(name, "}" if answer.begun else "{}")
    return True


_ELEMENT_NAME = re.compile(r"[^<>\s]+")
_END, _NEXT = "</parameter>", "<parameter="
_AFTER_VALUES = ("\n" + _NEXT, "\n</function>\n</tool_call>", "\n</function></tool_call>")
"""What ends a value whose closing tag is missing."""
_TYPES = {bool: "boolean", int: "integer number", float: "number", list: "array", dict: "object", type(None): "null"}
"""JSON types, but for strings, by Python's."""


def read_elements(answer: AnswerReader) -> Wait[bool]:
    """Read an element for each argument, as Qwen3-Coder writes them, with line breaks between all of these:

    <function=name> <parameter=city> Paris </parameter> </function>

    Calls as JSON objects are read too.
    """
    if not (yield from answer.literal("<function=")):
        return (yield from read_object(answer))
    name = yield from _read_element_name(answer)
    if not answer.is_function(name):
        return False
    yield from answer.spaces()
    while (yield from answer.literal(_NEXT)) and (parameter := (yield from _read_element_name(answer))):
        answer.add(name, f"{', ' if answer.begun else '{'}{json_text(parameter)}: ")
        yield from _read_element(answer, *_types_and_choices(answer.functions.get(name), parameter))
        yield from answer.spaces()
    if (yield from answer.literal("</function>", or_end=True)):
        answer.add(name, "}" if answer.begun else "{}")
    return answer.begun


def _read_element_name(answer: AnswerReader) -> Wait[str]:
    name = yield from answer.word(_ELEMENT_NAME)
    return name if (yield from answer.literal(">")) else ""


def _read_element(answer: AnswerReader, types: set[str], choices: dict[str, str]) -> Wait[None]:
    """Read a parameter's value: text, which passes as it comes, unless the function's schema says that it may be JSON.

    One line break at each end belongs to the elements.
    """
    yield from answer.literal("\n")
    if types <= {"string"} and not choices:
        answer.add_arguments('"')
        if (yield from _read_element_text(answer, lambda text: answer.add_arguments(json_text(text)[1:-1]))):
            answer.add_arguments('"')
        return
    pieces: list[str] = []
    if (yield from _read_element_text(answer, pieces.append)):
        text = "".join(pieces)
        answer.add_arguments(choices.get(text.strip()) or _as_json(text, types))


def _as_json(text: str, types: set[str]) -> str:
    """The value that the text denotes, if the types allow one that is no string and it is such, else the text."""
    value = literal_as_json(text.strip())
    if value is None or ("string" in types and types.isdisjoint(_TYPES.get(type(json.loads(value)), "").split())):
        return json_text(text)
    return value


def _read_element_text(answer: AnswerReader, sink: Sink) -> Wait[bool]:
    """Read a value's text. Returns whether its closing tag has come, or what may only come behind it."""
    while mark := (yield from answer.until(("\n", _END, _NEXT), sink)):
        if mark == _NEXT or (yield from answer.literal("\n" + _END, _END)):
            return True
        if (yield from answer.ahead(_AFTER_VALUES)):
            answer.take()
            return True
        sink(answer.take(len(mark)))
    return False


def _types_and_choices(function: Any, parameter: str) -> tuple[set[str], dict[str, str]]:
    """JSON types, and values as written in an element and in JSON, that a function's schema has for a parameter.

    Nobody has checked the schema.
    """
    schema = _as(dict, _as(dict, _as(dict, function).get("properties")).get(parameter))
    options = [schema, *(_as(dict, one) for name in ("anyOf", "oneOf") for one in _as(list, schema.get(name)))]
    named = [one for option in options for one in (option.get("type"), *_as(list, option.get("type")))]
    types = {one for one in named if isinstance(one, str)} | ({"object"} if schema.get("$ref") else set())
    values = [*_as(list, schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    return types, {value if isinstance(value, str) else json_text(value): json_text(value) for value in values}


def _as(kind: type[Kind], value: Any) -> Kind:
    """The value if it is of this kind, else an empty one."""
    return value if isinstance(value, kind) else kind()
