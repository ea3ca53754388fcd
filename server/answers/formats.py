"""The nodes of xgrammar's structural tags: plain JSON that says which texts an answer may be; the core compiles it."""

import json
from typing import Any, TypeAlias

from configs.sampling import StructuredOutput
from server.answers.reasoning import ReasoningStyle

Format: TypeAlias = dict[str, Any]

_MAX_SPACES = 20
"""Consecutive white space in JSON: without a limit, models fill their answer with it."""


def structural_tag(answer: Format) -> StructuredOutput:
    return StructuredOutput("structural_tag", json.dumps({"type": "structural_tag", "format": answer}))


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def json_value(schema: Any, style: str = "json", *, may_loosen: bool = False) -> Format:
    """With `may_loosen` a schema that cannot be used stands for any value, or any object."""
    node = {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": _MAX_SPACES}
    return {**node, "may_loosen": True} if may_loosen else node


def reasoning_part(reasoning: ReasoningStyle, *, starts_inside: bool) -> Format:
    anything: Format = {"type": "any_text"}
    begin = "" if starts_inside else reasoning.opening
    part = sequence(
        {"type": "tag", "begin": begin, "content": anything, "end": reasoning.closing},
        {"type": "regex", "pattern": "\\n{0,2}"},
    )
    return part if starts_inside else {"type": "optional", "content": part}
