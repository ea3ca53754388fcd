"""What a model may write so that its calls fit the tools, as one of xgrammar's structural tags.

The language is the style's own: free text, then calls of known functions with arguments that follow their schemas.
Whatever it holds, `AnswerParser` reads it as these calls. The tag is plain JSON; the core compiles it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from configs.errors import InvalidRequest
from configs.sampling import StructuredOutput
from engine.structured.loose_schema import loosened
from server.answers.formats import Format, either, json_value, reasoning_part, sequence, structural_tag, text
from server.answers.python_calls import PythonCalls
from server.answers.reasoning import ReasoningStyle
from server.answers.tool_styles import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PYTHONIC,
    PYTHONIC_TAGGED,
    QWEN_CODER,
    ToolStyle,
)

Choice: TypeAlias = Literal["none", "auto", "required"]

MAX_BYTES = 128 * 1024
"""Of all functions together, in JSON: a list of calls names each behind each."""
_TYPING = ("$ref", "anyOf", "oneOf", "allOf", "type", "enum", "const")


class Layout(NamedTuple):
    """What surrounds a call's arguments. NAME stands for the function's name."""

    begin: str
    end: str
    separator: str
    """Between two calls."""
    list_begin: str = ""
    """Before the first call."""
    list_end: str = ""
    trigger: str = ""
    """What free text may not hold without a call behind it; by default, the first call's beginning."""


LAYOUTS = {
    HERMES.name: Layout('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>"),
    LLAMA.name: Layout('{"name": "NAME", "parameters": ', "}", "; ", trigger='{"name": '),
    MISTRAL.name: Layout('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]", trigger="[TOOL_CALLS]"),
    MISTRAL_NAMED.name: Layout("[TOOL_CALLS]NAME[ARGS]", "", "", trigger="[TOOL_CALLS]"),
    PYTHONIC.name: Layout("NAME(", ")", ", ", "[", "]"),
    PYTHONIC_TAGGED.name: Layout("NAME(", ")", "\n", "<function_calls>\n", "\n</function_calls>", "<function_calls>"),
    QWEN_CODER.name: Layout(
        "<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "\n", trigger="<tool_call>"
    ),
}


def tool_grammar(
    style: ToolStyle,
    tools: Sequence[Mapping[str, Any]],
    choice: Choice,
    *,
    parallel: bool = True,
    reasoning: ReasoningStyle | None = None,
    starts_inside: bool = False,
    passed_over: list[str] | None = None,
) -> StructuredOutput | None:
    """The answer's language; None where any text will do.

    `tools` are as in a chat completion's request. With "required" there is nothing but calls; a request for one
    function is "required" with this tool alone and `parallel` false. With "auto" only tools that are strict have to
    follow their schemas, and without such tools only `parallel` false restricts anything: the answer ends with its
    first call. What cannot be enforced of the schema of one that is not strict is added to `passed_over`. With
    `reasoning` the answer may begin with a reasoning part, and must end one that the prompt began.
    """
    functions = [tool["function"] for tool in tools]
    passed_over = [] if passed_over is None else passed_over
    strict = any(function.get("strict") for function in functions)
    if choice == "none" or not functions or (choice == "auto" and parallel and not strict):
        return None
    if len(json.dumps(functions)) > MAX_BYTES:
        raise InvalidRequest(f"functions that calls have to fit may have {MAX_BYTES} bytes of JSON", param="tools")
    functions = [_bound(function, choice, passed_over) for function in functions]
    layout = LAYOUTS[style.name]
    tags = [_tag(style, layout, function, functions, parallel) for function in functions]
    once = bool(layout.list_begin) or not parallel
    if choice == "required":
        separator = {"separator": layout.separator, "at_least_one": True}
        answer: Format = {"type": "tags_with_separator", "tags": tags, "stop_after_first": once, **separator}
    else:
        triggers = [layout.trigger] if layout.trigger else [tag["begin"] for tag in tags]
        answer = {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": once}
    if reasoning:
        answer = sequence(reasoning_part(reasoning, starts_inside=starts_inside), answer)
    return structural_tag(answer)


def _tag(
    style: ToolStyle,
    layout: Layout,
    function: Mapping[str, Any],
    functions: Sequence[Mapping[str, Any]],
    parallel: bool,
) -> Format:
    """A call of `function`, and in a list also those of the calls behind it."""
    begin = layout.list_begin + layout.begin.replace("NAME", function["name"])
    content = _arguments(style, function)
    if not layout.list_begin:
        return {"type": "tag", "begin": begin, "content": content, "end": layout.end}
    content = sequence(content, text(layout.end))
    if parallel:
        others = [
            sequence(
                text(layout.separator + layout.begin.replace("NAME", other["name"])),
                _arguments(style, other),
                text(layout.end),
            )
            for other in functions
        ]
        content = sequence(content, {"type": "star", "content": either(*others)})
    return {"type": "tag", "begin": begin, "content": content, "end": layout.list_end}


def _bound(function: Mapping[str, Any], choice: str, passed_over: list[str]) -> Mapping[str, Any]:
    """The function with the schema that its arguments follow; one that is not strict as far as it can be enforced."""
    is_strict = bool(function.get("strict"))
    schema = function.get("parameters") if choice == "required" or is_strict else None
    schema = dict(schema or {})
    if not any(key in schema for key in _TYPING):
        schema = {"type": "object", **schema}
    if not is_strict:
        schema = loosened(schema, passed_over, function["name"])
        if not any(key in schema for key in _TYPING):
            schema = {"type": "object", **schema}
    return {"name": function["name"], "parameters": schema, "strict": is_strict}


def _arguments(style: ToolStyle, function: Mapping[str, Any]) -> Format:
    schema, may_loosen = function["parameters"], not function["strict"]
    if style.reader is PythonCalls:
        return _keywords(schema, may_loosen)
    return json_value(schema, "qwen_xml" if style is QWEN_CODER else "json", may_loosen=may_loosen)


def _keywords(schema: dict[str, Any], may_loosen: bool) -> Format:
    """`name=value` for each property, JSON values, in the schema's order; any keywords without properties."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        if schema.get("additionalProperties") is False:
            return text("")
        keyword = sequence({"type": "regex", "pattern": "[a-z_]+="}, json_value({}))
        more = {"type": "star", "content": sequence(text(", "), keyword)}
        return {"type": "optional", "content": sequence(keyword, more)}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    pairs = {
        name: sequence(
            text(name + "="),
            json_value({**shared, **value} if isinstance(value, dict) else value, may_loosen=may_loosen),
        )
        for name, value in properties.items()
    }
    named = schema.get("required")
    required = [name for name in properties if isinstance(named, list) and name in named]
    rest = [pairs[name] for name in properties if name not in required]
    optional = [{"type": "optional", "content": sequence(text(", "), pair)} for pair in rest]
    if required:
        first, *others = (pairs[name] for name in required)
        return sequence(first, *(sequence(text(", "), pair) for pair in others), *optional)
    starts = [sequence(pair, *optional[index + 1 :]) for index, pair in enumerate(rest)]
    return {"type": "optional", "content": either(*starts)}
