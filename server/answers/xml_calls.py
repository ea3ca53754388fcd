"""Calls with an element for each argument, as Qwen3-Coder writes them, with line breaks between all of these:

<tool_call> <function=name> <parameter=city> Paris </parameter> </function> </tool_call>
"""

import json
import re
from typing import Any

from server.answers.calls import JsonToolParser
from server.answers.reader import Sink, Wait, json_text, literal_as_json

_NAME = re.compile(r"[^<>\s]+")
_END = "</parameter>"
_NEXT = "<parameter="
_AFTER_VALUES = ("\n" + _NEXT, "\n</function>\n</tool_call>", "\n</function></tool_call>")
"""What ends a value whose closing tag is missing."""
_TYPES = {bool: "boolean", int: "integer number", float: "number", list: "array", dict: "object", type(None): "null"}
"""JSON types, but for strings, by Python's."""


class XmlToolParser(JsonToolParser):
    """The function's schema tells what is text and what is JSON; unknown parameters are text, which passes as it comes.

    Calls as JSON objects are read too.
    """

    def read_call(self) -> Wait[bool]:
        """Read a function's element."""
        answer = self.answer
        if not (yield from answer.literal("<function=")):
            return (yield from super().read_call())
        name = yield from answer.word(_NAME)
        closed = yield from answer.literal(">")
        if not closed or not self.is_offered(name):
            return False
        yield from answer.spaces()
        while parameter := (yield from self._read_parameter_name()):
            self.add(name, (", " if self.begun else "{") + json_text(parameter) + ": ")
            yield from self._read_value(*_types_and_choices(self.functions.get(name), parameter))
            yield from answer.spaces()
        if (yield from answer.literal("</function>", or_end=True)):
            self.add(name, "}" if self.begun else "{}")
        return self.begun

    def _read_parameter_name(self) -> Wait[str]:
        answer = self.answer
        if not (yield from answer.literal(_NEXT)):
            return ""
        name = yield from answer.word(_NAME)
        return name if (yield from answer.literal(">")) else ""

    def _read_value(self, types: set[str], choices: dict[str, str]) -> Wait[None]:
        """Read a parameter's value. One line break at each end belongs to the elements."""
        answer = self.answer
        yield from answer.literal("\n")
        if types <= {"string"} and not choices:
            answer.add_arguments('"')
            ended = yield from self._read_text(lambda text: answer.add_arguments(json_text(text)[1:-1]))
            answer.add_arguments('"' if ended else "")
            return
        pieces: list[str] = []
        if (yield from self._read_text(pieces.append)):
            text = "".join(pieces)
            answer.add_arguments(choices.get(text.strip()) or _as_json(text, types))

    def _read_text(self, sink: Sink) -> Wait[bool]:
        """Read a value's text. Returns whether its closing tag has come, or what may only come behind it."""
        answer = self.answer
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
    schema = _member(_member(function, "properties"), parameter)
    options = [schema, *_items(_member(schema, "anyOf")), *_items(_member(schema, "oneOf"))]
    named = [_member(option, "type") for option in options]
    types = {one for name in named for one in (name, *_items(name)) if isinstance(one, str)}
    if _member(schema, "$ref"):
        types.add("object")
    values = [
        *_items(_member(schema, "enum")),
        *([schema["const"]] if isinstance(schema, dict) and "const" in schema else ()),
    ]
    choices = {value if isinstance(value, str) else json_text(value): json_text(value) for value in values}
    return types, choices


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _as_json(text: str, types: set[str]) -> str:
    """The value that the text denotes, if the types allow one that is no string and it is such, else the text."""
    value = literal_as_json(text.strip())
    if value is None or ("string" in types and types.isdisjoint(_TYPES.get(type(json.loads(value)), "").split())):
        return json_text(text)
    return value


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
