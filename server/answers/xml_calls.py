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

from server.answers.json_calls import HermesCalls
from server.answers.reader import Sink, Wait
from server.answers.values import literal_as_json

_NAME = re.compile(r"[^<>\s]+")
_END = "</parameter>"
_NEXT = "<parameter="
_AFTER_VALUES = ("\n" + _NEXT, "\n</function>\n</tool_call>", "\n</function></tool_call>")
"""What ends a value whose closing tag is missing."""
_TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: set(),
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


class XmlCalls(HermesCalls):
    """The function's schema tells what is text and what is JSON; unknown parameters are text, which passes as it comes.

    JSON objects as in the Hermes style are calls too.
    """

    markers = ("<tool_call>", "<function=")
    bare = ("<function=",)

    def read_call(self, marker: str) -> Wait[bool]:
        reader = self.reader
        if not (yield from reader.literal("<function=")):
            return (yield from super().read_call(marker))
        name = yield from reader.word(_NAME)
        closed = yield from reader.literal(">")
        if not closed or not self.is_offered(name, marker):
            return False
        num_parameters = 0
        while True:
            yield from reader.spaces()
            parameter = yield from self._read_parameter_name()
            ended = not parameter and (yield from reader.closing("</function>"))
            if not parameter and not ended:
                return num_parameters > 0
            if not num_parameters:
                self.begin(name)
            if ended:
                self.writer.add_arguments("}" if num_parameters else "{}")
                return True
            key = json.dumps(parameter, ensure_ascii=False)
            self.writer.add_arguments((", " if num_parameters else "{") + key + ": ")
            num_parameters += 1
            yield from self._read_value(_schema(self.functions.get(name), parameter))

    def _read_parameter_name(self) -> Wait[str]:
        reader = self.reader
        if not (yield from reader.literal(_NEXT)):
            return ""
        name = yield from reader.word(_NAME)
        return name if (yield from reader.literal(">")) else ""

    def _read_value(self, schema: dict[str, Any]) -> Wait[None]:
        """One line break at each end belongs to the elements."""
        reader, add = self.reader, self.writer.add_arguments
        types, choices = _types(schema), _choices(schema)
        yield from reader.literal("\n")
        if types <= {"string"} and not choices:
            add('"')
            ended = yield from self._read_text(lambda text: add(json.dumps(text, ensure_ascii=False)[1:-1]))
            add('"' if ended else "")
            return
        pieces: list[str] = []
        if (yield from self._read_text(pieces.append)):
            text = "".join(pieces)
            add(choices.get(text.strip()) or _as_json(text, types))

    def _read_text(self, sink: Sink) -> Wait[bool]:
        """Whether the closing tag has come, or what may only come behind it."""
        reader = self.reader
        while mark := (yield from reader.until(("\n", _END, _NEXT), sink)):
            if (yield from reader.literal("\n" + _END, _END)):
                return True
            if mark == _NEXT:
                return True
            if (yield from reader.ahead(_AFTER_VALUES)):
                reader.take()
                return True
            sink(reader.take(len(mark)))
        return False


def _schema(function: Any, parameter: str) -> dict[str, Any]:
    """The parameter's schema; empty when the function's does not tell."""
    properties = function.get("properties") if isinstance(function, dict) else None
    found = properties.get(parameter) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def _types(schema: dict[str, Any]) -> set[str]:
    """JSON types that the schema names."""
    types: set[str] = {"object"} if "$ref" in schema else set()
    for option in (schema, *_items(schema.get("anyOf")), *_items(schema.get("oneOf"))):
        named = option.get("type") if isinstance(option, dict) else None
        types.update(name for name in [named, *_items(named)] if isinstance(name, str))
    return types


def _choices(schema: dict[str, Any]) -> dict[str, str]:
    """Values that the schema enumerates: their text in an element, and as JSON."""
    values = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
    written = [(value, json.dumps(value, ensure_ascii=False)) for value in values]
    return {value if isinstance(value, str) else text: text for value, text in written}


def _items(value: Any) -> list[Any]:
    """Of a list in a schema, which nobody has checked."""
    return value if isinstance(value, list) else []


def _as_json(text: str, types: set[str]) -> str:
    """The value that the text denotes, if the schema allows one that is no string and it is such, else the text."""
    try:
        value = literal_as_json(text.strip())
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and not types & _TYPES[type(json.loads(value))]:
        return json.dumps(text, ensure_ascii=False)
    return value
