"""Where a value of JSON or Python ends, found while its text passes."""

import ast
import json
import re
import warnings
from typing import Any, NamedTuple

from server.answers.reader import Reader, Sink, Wait

_CLOSING = {"{": "}", "[": "]", "(": ")"}
_WORD = re.compile(r"[\w.+-]+")
_CONTROL = re.compile(r"[\x00-\x1f]")


class Notation(NamedTuple):
    quotes: str
    plain: re.Pattern[str]
    """A run of characters that are neither quotes nor brackets."""


JSON = Notation('"', re.compile(r'[^"{}\[\]]+'))
PYTHON = Notation("\"'", re.compile(r"""[^"'{}\[\]()]+"""))


def copy_value(reader: Reader, sink: Sink, notation: Notation) -> Wait[bool]:
    """Read one value: a string, something in brackets, or a word. False where the text ends or cannot go on so."""
    closing: list[str] = []
    while True:
        if closing:
            yield from reader.span(notation.plain, sink)
        character = yield from reader.peek()
        if character and character in notation.quotes:
            if not (yield from copy_string(reader, sink, notation)):
                return False
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
            sink(reader.take())
        elif closing:
            if character != closing.pop():
                return False
            sink(reader.take())
        else:
            word = yield from reader.word(_WORD)
            sink(word)
            return bool(word)
        if not closing:
            return True


def copy_string(reader: Reader, sink: Sink, notation: Notation) -> Wait[bool]:
    """Read a string, quotes included. A raw control character, which JSON forbids in strings, leaves escaped there."""
    quote = reader.take()
    if notation is PYTHON:
        quote += yield from reader.literal(quote * 2)
        if len(quote) == 1 and (yield from reader.literal(quote)):
            sink(quote * 2)
            return True
    inner = _escaping(sink) if notation is JSON else sink
    sink(quote)
    while mark := (yield from reader.until((quote, "\\"), inner)):
        sink(reader.take(len(mark)))
        if mark == quote:
            return True
        yield from reader.peek()
        sink(reader.take())
    return False


def json_value(text: str) -> Any:
    """The value of JSON text. Raises ValueError for what is none, or a string that no UTF-8 can hold."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if isinstance(value, str):
        value.encode()
    return value


def literal_as_json(text: str) -> str:
    """JSON text for a literal of Python or JSON. Raises ValueError for anything else."""
    for strict in (True, False):
        try:
            value = json.loads(text, strict=strict, parse_constant=_refuse)
            return text if strict else json.dumps(value)
        except (ValueError, RecursionError):
            continue
    return _python_as_json(text)


def _python_as_json(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escapes in the model's strings
            value = ast.literal_eval(text)
        converted = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("not a literal") from error
    converted.encode()
    return converted


def _refuse(constant: str) -> None:
    """Python's parser knows NaN and Infinity, which are no JSON."""
    raise ValueError(constant)


def _escaping(sink: Sink) -> Sink:
    return lambda text: sink(_CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text))
