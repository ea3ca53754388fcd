"""Calls with an element for each argument, as Qwen3-Coder writes them.

<tool_call>
<function=name>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

import json
import re
from typing import Any

from server.answers.calls import JsonToolParser
from server.answers.reader import Sink, Wait, literal_as_json

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
        before = "{"
        while True:
            yield from answer.spaces()
            parameter = yield from self._read_parameter_name()
            ended = not parameter and (yield from answer.literal("</function>", or_end=True))
            if not parameter and not ended:
                return before != "{"
            if before == "{":
                answer.begin_call(name)
            if ended:
                answer.add_arguments("{}" if before == "{" else "}")
                return True
            answer.add_arguments(f"{before}{_json(parameter)}: ")
            before = ", "
            yield from self._read_value(_Schema(self.functions.get(name), parameter))

    def _read_parameter_name(self) -> Wait[str]:
        answer = self.answer
        if not (yield from answer.literal(_NEXT)):
            return ""
        name = yield from answer.word(_NAME)
        return name if (yield from answer.literal(">")) else ""

    def _read_value(self, schema: "_Schema") -> Wait[None]:
        """Read a parameter's value. One line break at each end belongs to the elements."""
        answer = self.answer
        yield from answer.literal("\n")
        if schema.is_text:
            answer.add_arguments('"')
            ended = yield from self._read_text(lambda text: answer.add_arguments(_json(text)[1:-1]))
            answer.add_arguments('"' if ended else "")
            return
        pieces: list[str] = []
        if (yield from self._read_text(pieces.append)):
            answer.add_arguments(schema.as_json("".join(pieces)))

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


class _Schema:
    """What a function's schema, which nobody has checked, says of one parameter."""

    def __init__(self, function: Any, parameter: str) -> None:
        properties = function.get("properties") if isinstance(function, dict) else None
        found = properties.get(parameter) if isinstance(properties, dict) else None
        schema: dict[str, Any] = found if isinstance(found, dict) else {}
        options = [schema, *_items(schema.get("anyOf")), *_items(schema.get("oneOf"))]
        named = [option.get("type") for option in options if isinstance(option, dict)]
        self.types = {one for name in named for one in (name, *_items(name)) if isinstance(one, str)}
        """JSON types that the schema names."""
        if "$ref" in schema:
            self.types.add("object")
        values = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
        written = [(value, _json(value)) for value in values]
        self.choices = {value if isinstance(value, str) else text: text for value, text in written}
        """Values that the schema enumerates: their text in an element, and as JSON."""

    @property
    def is_text(self) -> bool:
        return self.types <= {"string"} and not self.choices

    def as_json(self, text: str) -> str:
        """The value that the text denotes, if the schema allows one that is no string and it is such, else the text."""
        stripped = text.strip()
        if stripped in self.choices:
            return self.choices[stripped]
        try:
            value = literal_as_json(stripped)
        except ValueError:
            return _json(text)
        if "string" in self.types and self.types.isdisjoint(_TYPES.get(type(json.loads(value)), "").split()):
            return _json(text)
        return value


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
