"""What a grammar may cost: bounds that are told before anything is compiled, and what is cheap for certain.

Times are of xgrammar 0.2.9 with a vocabulary of 49,152 tokens.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from configs.sampling import StructuredOutput

from .lark import is_lark

MAX_PROPERTIES = 2000
"""Most properties of all objects together: 1 s where they are optional."""
MAX_CHOSEN_PROPERTIES = 48
"""Most optional properties beside minProperties or maxProperties; the time grows with the cube, 80 take 0.7 s."""
MAX_FORMATS = 200
"""Most strings with a format: 0.5 s and 40 MB."""
MAX_MULTIPLES = 4096
"""The sum of all multipleOf, whose time grows with the square: 0.4 s."""

_CHEAP_SOURCE = 16 * 1024
_CHEAP_PATTERN = 64
_CHEAP_WIDE = 64
"""States of an automaton in which nearly any token may come: 15 ms each."""
_CHEAP_CHOSEN = 16
_CHEAP_MULTIPLE = 100
_WIDE_FORMATS = {"email": 8, "uri": 4, "uri-reference": 4, "uri-template": 4}
_COSTLY = ("patternProperties", "propertyNames", "grammar")
_WIDE = re.compile(r"\.|\[\^|\\[DWSpPu]")
_OPTIONAL = re.compile(r"(?<!\()\?|\*|\{0|\|\)|\(\||\|\||\(\?:\|")
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def check_costs(document: Any) -> None:
    """Raises ValueError for a schema, or a structural tag with schemas, that is beyond a bound."""
    properties = formats = multiples = chosen = 0
    for node in _objects(document):
        named = node.get("properties")
        count = len(named) if isinstance(named, dict) else 0
        properties += count
        formats += isinstance(node.get("format"), str)
        step = node.get("multipleOf")
        multiples += step if isinstance(step, int) else 0
        if "minProperties" in node or "maxProperties" in node:
            required = node.get("required")
            chosen += max(0, count - (len(required) if isinstance(required, list) else 0)) ** 3
    for value, most, words in (
        (properties, MAX_PROPERTIES, f"more than {MAX_PROPERTIES} properties"),
        (
            chosen,
            MAX_CHOSEN_PROPERTIES**3,
            f"minProperties or maxProperties over {MAX_CHOSEN_PROPERTIES} optional",
        ),
        (formats, MAX_FORMATS, f"more than {MAX_FORMATS} strings with a format"),
        (multiples, MAX_MULTIPLES, f"multipleOf that add up to more than {MAX_MULTIPLES}"),
    ):
        if value > most:
            raise ValueError(f"it is too costly to compile: {words}")


def is_cheap(structured: StructuredOutput) -> bool:
    """Whether its compilation takes less than about a second, whatever it is."""
    kind, source = structured.kind, structured.source
    if len(source) > _CHEAP_SOURCE:
        return False
    if kind == "regex":
        return _is_cheap_pattern(source)
    if kind == "grammar":
        return not (is_lark(source) and "~" in source) and _is_cheap_pattern(source)
    if kind in ("json_object", "choice"):
        return True
    try:
        document = json.loads(source)
    except (ValueError, RecursionError):
        return True  # which is soon found out
    costs = [_wide_states(node) for node in _objects(document)]
    return None not in costs and sum(filter(None, costs)) <= _CHEAP_WIDE


def _wide_states(node: dict[str, Any]) -> int | None:
    """None: unknown, or many."""
    properties = node.get("properties")
    named = properties if isinstance(properties, dict) else {}
    is_chosen = "minProperties" in node or "maxProperties" in node
    if any(keyword in node for keyword in _COSTLY) or (is_chosen and len(named) > _CHEAP_CHOSEN):
        return None
    if isinstance(step := node.get("multipleOf"), int) and step > _CHEAP_MULTIPLE:
        return None
    if isinstance(pattern := node.get("pattern"), str) and not _is_cheap_pattern(pattern):
        return None
    wide = len(json.dumps([node.get(key) for key in ("end", "triggers", "excludes")]))
    opened = node.get("additionalProperties", node.get("unevaluatedProperties", False)) is not False
    names = sum(map(len, named)) if opened else 0
    form = node.get("format")
    return (
        names + max(0, wide - len("[null, null, null]")) + (_WIDE_FORMATS.get(form, 1) if isinstance(form, str) else 0)
    )


def _is_cheap_pattern(pattern: str) -> bool:
    repeats = 1
    for least, most in _REPEAT.findall(pattern):
        repeats *= max(1, int(most or least)) if len(most or least) < 4 else 1000
    if "){" in pattern and _OPTIONAL.search(pattern):  # ways through a chain that may be empty
        repeats *= repeats
    num_wide = max(1, len(_WIDE.findall(pattern)))
    return len(pattern) <= _CHEAP_PATTERN and repeats * num_wide <= _CHEAP_WIDE


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    todo = [document]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            yield node
            todo += node.values()
        elif isinstance(node, list):
            todo += node
