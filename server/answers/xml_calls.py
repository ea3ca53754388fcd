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
            yield from self._read_value(_types(self.functions.get(name), parameter))

    def _read_parameter_name(self) -> Wait[str]:
        reader = self.reader
        if not (yield from reader.literal("<parameter=")):
            return ""
        name = yield from reader.word(_NAME)
        return name if (yield from reader.literal(">")) else ""

    def _read_value(self, types: set[str]) -> Wait[None]:
        """One line break at each end belongs to the elements."""
        reader, add = self.reader, self.writer.add_arguments
        yield from reader.literal("\n")
        if types <= {"string"}:
            add('"')
            ended = yield from self._read_text(lambda text: add(json.dumps(text, ensure_ascii=False)[1:-1]))
            add('"' if ended else "")
            return
        pieces: list[str] = []
        if (yield from self._read_text(pieces.append)):
            add(_as_json("".join(pieces), types))

    def _read_text(self, sink: Sink) -> Wait[bool]:
        """Whether the closing tag has come."""
        reader = self.reader
        while mark := (yield from reader.until(("\n", _END), sink)):
            if (yield from reader.literal("\n" + _END, _END)):
                return True
            sink(reader.take(len(mark)))
        return False


def _types(schema: Any, parameter: str) -> set[str]:
    """JSON types that the schema of a parameter names; none when it does not tell."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.get(parameter) if isinstance(properties, dict) else None
    if not isinstance(found, dict):
        return set()
    options = [found, *(found.get("anyOf") or ()), *(found.get("oneOf") or ())]
    types: set[str] = set()
    for option in options:
        named = option.get("type") if isinstance(option, dict) else None
        types.update([named] if isinstance(named, str) else named or ())
    if not types and "$ref" in found:
        return {"object"}
    return types


def _as_json(text: str, types: set[str]) -> str:
    """The value that the text denotes, if the schema allows one that is no string and it is such, else the text."""
    try:
        value = literal_as_json(text.strip())
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and not types & _TYPES[type(json.loads(value))]:
        return json.dumps(text, ensure_ascii=False)
    return value
