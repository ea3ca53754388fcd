"""The language of a whole answer: reasoning, then tool calls or content in the language that the request gives."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import InvalidRequest
from configs.sampling import StructuredOutput
from server.answers.formats import Format, either, json_value, reasoning_part, sequence, structural_tag, text
from server.answers.reasoning import ReasoningStyle
from server.answers.tool_grammar import Choice, tool_grammar
from server.answers.tool_styles import ToolStyle


def answer_grammar(
    style: ToolStyle,
    tools: Sequence[Mapping[str, Any]],
    choice: Choice,
    *,
    parallel: bool,
    reasoning: ReasoningStyle | None,
    starts_inside: bool,
    content: StructuredOutput | None,
    passed_over: list[str],
) -> StructuredOutput | None:
    """None where any text will do. With choice "required" there is no content, else it is in the language `content`.

    The other arguments are those of `tool_grammar`.
    """
    if content is None or (tools and choice == "required"):
        return tool_grammar(
            style,
            tools,
            choice,
            parallel=parallel,
            reasoning=reasoning,
            starts_inside=starts_inside,
            passed_over=passed_over,
        )
    calls = None
    if choice == "auto":
        calls = tool_grammar(style, tools, "required", parallel=parallel, passed_over=passed_over)
    if calls is None and reasoning is None:
        return content
    answer = _format(content)
    if calls is not None:
        answer = either(answer, json.loads(calls.source)["format"])
    if reasoning is not None:
        answer = sequence(reasoning_part(reasoning, starts_inside=starts_inside), answer)
    return structural_tag(answer)


def _format(structured: StructuredOutput) -> Format:
    """As a node of a structural tag."""
    kind, source = structured.kind, structured.source
    if kind == "json_object":
        return json_value({"type": "object"})
    if kind == "json_schema":
        return json_value(_parsed(source))
    if kind == "choice":
        return either(*map(text, json.loads(source)))
    if kind == "regex":
        return {"type": "regex", "pattern": source}
    if kind == "grammar":
        return {"type": "grammar", "grammar": source}
    tag = _parsed(source)
    if not isinstance(tag, dict):
        raise InvalidRequest("a structural tag is a JSON object", param="structured")
    inner: Format = tag.get("format", tag)
    return inner


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError as error:
        raise InvalidRequest(f"not JSON: {error}", param="structured") from error
