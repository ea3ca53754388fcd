"""The language of a whole answer: reasoning, then tool calls or content in the language that the request gives."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import InvalidRequest
from configs.sampling import StructuredOutput
from server.answers.reasoning import ReasoningStyle
from server.answers.tool_grammar import Choice, Format, _json, _reasoning_part, _sequence, _text, tool_grammar
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
) -> StructuredOutput | None:
    """None where any text will do. See `tool_grammar`; with "required" there is no content, else it may be `content`."""
    if content is None or (tools and choice == "required"):
        return tool_grammar(style, tools, choice, parallel=parallel, reasoning=reasoning, starts_inside=starts_inside)
    calls = tool_grammar(style, tools, "required", parallel=parallel) if choice == "auto" else None
    if calls is None and reasoning is None:
        return content
    answer = _format(content)
    if calls is not None:
        answer = {"type": "or", "elements": [answer, json.loads(calls.source)["format"]]}
    if reasoning is not None:
        answer = _sequence(_reasoning_part(reasoning, starts_inside=starts_inside), answer)
    return StructuredOutput("structural_tag", json.dumps({"type": "structural_tag", "format": answer}))


def _format(structured: StructuredOutput) -> Format:
    """As a node of a structural tag."""
    kind, source = structured.kind, structured.source
    if kind == "json_object":
        return _json({"type": "object"})
    if kind == "json_schema":
        return _json(_parsed(source))
    if kind == "choice":
        return {"type": "or", "elements": [_text(choice) for choice in json.loads(source)]}
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
