"""How large a text, list or number becomes that a chat template asks for: known before it is made."""

import re
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError

MAX_SIZE = 2**27
"""Characters that one rendering may make, in all its texts; an element of a list counts as `ELEMENT`."""
MAX_BITS = 10_000
"""Of a number."""
ELEMENT = 64

_LISTS: Any = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS = (dict, *_LISTS)
"""What C code walks through, other than texts."""
_PADDING = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)|\{[^{}]*:[^{}]*\d{5}")
"""In a format: a width that is absurd, or that comes with the values."""


def size_of(value: Any) -> int:
    """Characters and elements of all that `value` holds; where that is more than may be made, some such number."""
    if isinstance(value, str):
        return ELEMENT + len(value)
    size, found = 0, [value]
    while found and size <= MAX_SIZE:
        one = found.pop()
        size += ELEMENT
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            found += [*one.keys(), *one.values()]
        elif isinstance(one, _LISTS):
            found += one
    return size


def _sum(left: Any, right: Any) -> int:
    if isinstance(left, str):
        return len(left) + (len(right) if isinstance(right, str) else 0)
    return 0 if isinstance(left, int | float) else size_of(left) + size_of(right)


def _product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _bits(left.bit_length() + right.bit_length())
    many, count = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(count, int):
        return 0
    return (len(many) if isinstance(many, str) else size_of(many)) * max(0, count)


def _power(left: Any, right: Any) -> int:
    both_whole = isinstance(left, int) and isinstance(right, int)
    return _bits(left.bit_length() * max(0, right)) if both_whole else 0


def _bits(count: int) -> int:
    if count > MAX_BITS:
        raise SecurityError(f"it makes a number of more than {MAX_BITS:,} bits")
    return 0


def _remainder(left: Any, right: Any) -> int:
    return _format(left, right) if isinstance(left, str) else 0


def _format(text: str, *values: Any, **named: Any) -> int:
    """For both ways of formatting: every field may hold everything."""
    if _PADDING.search(text) or any(isinstance(one, int) and abs(one) > 10**5 and "{" in text for one in values):
        raise SecurityError("it pads a text too far")
    return len(text) + (text.count("%") + text.count("{")) * (size_of(values) + size_of(named))


def _joined(value: Any, separator: Any = "", attribute: Any = None) -> int:
    return size_of(value) + size_of(separator) * (len(value) if hasattr(value, "__len__") else 1)


def _replaced(text: Any, old: Any, new: Any, count: Any = None) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + text.count(old) * len(new)


def _padded(text: Any, width: Any = 80, *_: Any) -> int:
    return size_of(text) + abs(int(width))


def _indented(text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> int:
    return size_of(text) + (str(text).count("\n") + 1) * (abs(width) if isinstance(width, int) else size_of(width))


def _as_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **_: Any) -> int:
    deep = abs(indent) if isinstance(indent, int) else size_of(indent)
    return size_of(value) * (1 + (deep + size_of(separators)) // ELEMENT)


def _wrapped(text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *_: Any) -> int:
    return size_of(text) * (1 + len(str(wrapstring or "")))


def _summed(value: Any, attribute: Any = None, start: Any = 0) -> int:
    return 0 if isinstance(start, int | float) else size_of(value) * (len(value) if hasattr(value, "__len__") else 1)


def _counted(value: Any, count: Any = 0, *_: Any) -> int:
    """Of lists of `count` elements, or numbers of `count` digits."""
    return size_of(value) + ELEMENT * abs(int(count))


OPERATORS: dict[str, Callable[[Any, Any], int]] = {"+": _sum, "*": _product, "**": _power, "%": _remainder}
"""Size of the result, by operator."""
METHODS: dict[str, Callable[..., int]] = {
    "join": lambda text, value=(): _joined(value, text),
    "replace": _replaced,
    **dict.fromkeys(("format", "format_map"), _format),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
}
"""Of texts' methods that make more than they are given."""
FILTERS: dict[str, Callable[..., int]] = {
    "join": _joined,
    "replace": _replaced,
    "format": lambda text, *args, **kwargs: _format(str(text), args, kwargs),
    "center": _padded,
    "indent": _indented,
    "tojson": _as_json,
    "wordwrap": _wrapped,
    "sum": _summed,
    **dict.fromkeys(("batch", "slice", "round"), _counted),
    **dict.fromkeys(("list", "string", "pprint"), size_of),
}
"""Of such filters."""
WALKING = frozenset({"capitalize", "dictsort", "e", "escape", "forceescape", "groupby", "lower", "max", "min", "safe"})
WALKING |= {"sort", "striptags", "title", "trim", "truncate", "unique", "upper", "urlencode", "urlize", "wordcount"}
WALKING |= {"xmlattr"}
"""Filters that compare, or turn into text, all that a list holds."""
COMPARING = frozenset({"!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le"})
COMPARING |= {"lessthan", "lt", "ne"}
"""Tests that compare all that a list holds."""
