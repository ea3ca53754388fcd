"""Which texts a whole answer may be: reasoning, then tool calls, or content in the language that the request gives.

A grammar is one of xgrammar's structural tags, plain JSON, which the core compiles. The language of tool calls is the
style's own: free text, then calls of known functions with arguments that follow their schemas. Whatever it holds,
`AnswerParser` reads it as these calls.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from configs.errors import InvalidRequest
from configs.sampling import StructuredOutput
from engine.structured.loose_schema import loosened
from server.answers.styles import ReasoningParser, ToolStyle

Format: TypeAlias = dict[str, Any]
"""A node of a structural tag."""

MAX_BYTES = 128 * 1024
"""Of all functions together, in JSON: a list of calls names each behind each."""
_TYPING = ("$ref", "anyOf", "oneOf", "allOf", "type", "enum", "const")


def answer_grammar(
    style: ToolStyle,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_required: bool = False,
    parallel: bool = True,
    reasoning: ReasoningParser | None = None,
    starts_inside: bool = False,
    content: StructuredOutput | None = None,
    passed_over: list[str] | None = None,
) -> StructuredOutput | None:
    """The answer's language, or None where any text will do.

    `tools` are as in a chat completion's request. If calls are required, there is nothing else. If not, only tools that
    are strict have to follow their schemas, and without such tools only `parallel` false restricts anything: the answer
    ends with its first call. Where there is a language for content, it and calls that follow their schemas are all that
    an answer may hold. What cannot be enforced of the schema of a tool that is not strict is added to `passed_over`.
    With `reasoning` the answer may begin with a reasoning part, and must end one that the prompt began.
    Raises `InvalidRequest`.
    """
    passed_over = [] if passed_over is None else passed_over
    answer = _calls(style, tools, is_required or content is not None, parallel, passed_over)
    if content is not None and (answer is None or not is_required):
        if answer is None and reasoning is None:
            return content
        answer = _content(content) if answer is None else _either(_content(content), answer)
    if answer is None:
        return None
    if reasoning is not None:
        answer = _sequence(_reasoning(reasoning, starts_inside=starts_inside), answer)
    return StructuredOutput("structural_tag", json.dumps({"type": "structural_tag", "format": answer}))


def _reasoning(reasoning: ReasoningParser, *, starts_inside: bool) -> Format:
    begin = "" if starts_inside else reasoning.opening
    part = (_tag(begin, {"type": "any_text"}, reasoning.closing), {"type": "regex", "pattern": "\\n{0,2}"})
    return _sequence(*part) if starts_inside else _optional(*part)


def _content(structured: StructuredOutput) -> Format:
    kind, source = structured.kind, structured.source
    if kind == "json_object":
        return _value({"type": "object"})
    if kind == "regex":
        return {"type": "regex", "pattern": source}
    if kind == "grammar":
        return {"type": "grammar", "grammar": source}
    try:
        parsed = json.loads(source)
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}", param="structured") from error
    if kind == "choice":
        return _either(*map(_text, parsed))
    if kind == "json_schema":
        return _value(parsed)
    if not isinstance(parsed, dict):
        raise InvalidRequest("a structural tag is a JSON object", param="structured")
    inner: Format = parsed.get("format", parsed)
    return inner


def _calls(
    style: ToolStyle, tools: Sequence[Mapping[str, Any]], only_calls: bool, parallel: bool, passed_over: list[str]
) -> Format | None:
    functions = [tool["function"] for tool in tools]
    strict = any(function.get("strict") for function in functions)
    if not functions or (parallel and not strict and not only_calls):
        return None
    if len(json.dumps(functions)) > MAX_BYTES:
        raise InvalidRequest(f"functions that calls have to fit may have {MAX_BYTES} bytes of JSON", param="tools")
    calls = [_call(style, function, only_calls, passed_over) for function in functions]
    list_begin, _, list_end = style.calls.partition("…")
    if list_begin:
        behind = [_sequence(_text(style.separator + begin), content, _text(end)) for begin, content, end in calls]
        more = [{"type": "star", "content": _either(*behind)}] if parallel else []
        calls = [(list_begin + begin, _sequence(content, _text(end), *more), list_end) for begin, content, end in calls]
    tags = {"tags": [_tag(*call) for call in calls], "stop_after_first": bool(list_begin) or not parallel}
    if only_calls:
        return {"type": "tags_with_separator", **tags, "separator": style.separator, "at_least_one": True}
    triggers = [style.trigger] if style.trigger else [begin for begin, _, _ in calls]
    return {"type": "triggered_tags", **tags, "triggers": triggers}


def _call(
    style: ToolStyle, function: Mapping[str, Any], must_fit: bool, passed_over: list[str]
) -> tuple[str, Format, str]:
    """What a call of the function begins with, its arguments, and what it ends with.

    Arguments of a function that is not strict follow its schema as far as it can be enforced.
    """
    begin, _, end = style.call.partition("…")
    is_strict = bool(function.get("strict"))
    schema = _typed(function.get("parameters") if must_fit or is_strict else None)
    if not is_strict:
        schema = _typed(loosened(schema, passed_over, function["name"]))
    if style.arguments == "keywords":
        content = _keywords(schema, may_loosen=not is_strict)
    else:
        content = _value(schema, style.arguments, may_loosen=not is_strict)
    return begin.replace("NAME", function["name"]), content, end


def _typed(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema, which is one of objects where it says nothing else."""
    given = dict(schema or {})
    return given if any(key in given for key in _TYPING) else {"type": "object", **given}


def _keywords(schema: dict[str, Any], *, may_loosen: bool) -> Format:
    """`name=value` for each property, JSON values, in the schema's order; any keywords without properties."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        if schema.get("additionalProperties") is False:
            return _text("")
        keyword = _sequence({"type": "regex", "pattern": "[a-z_]+="}, _value({}))
        return _optional(keyword, {"type": "star", "content": _sequence(_text(", "), keyword)})
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    pairs = {
        name: _sequence(
            _text(name + "="),
            _value({**shared, **value} if isinstance(value, dict) else value, may_loosen=may_loosen),
        )
        for name, value in properties.items()
    }
    named = schema.get("required")
    required = [name for name in properties if isinstance(named, list) and name in named]
    rest = [pairs[name] for name in properties if name not in required]
    optional = [_optional(_text(", "), pair) for pair in rest]
    if required:
        first, *others = (pairs[name] for name in required)
        return _sequence(first, *(_sequence(_text(", "), pair) for pair in others), *optional)
    return _optional(_either(*(_sequence(pair, *optional[index + 1 :]) for index, pair in enumerate(rest))))


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _optional(*elements: Format) -> Format:
    return {"type": "optional", "content": _sequence(*elements)}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def _value(schema: Any, style: str = "json", *, may_loosen: bool = False) -> Format:
    """JSON that follows the schema. With `may_loosen` one that cannot be used stands for any value, or any object."""
    node = {"type": "json_schema", "json_schema": schema, "style": style}
    return {**node, "may_loosen": True} if may_loosen else node
