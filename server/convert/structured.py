"""What a request says about the language of its answer, as `StructuredOutput`."""

import json
from collections.abc import Callable
from typing import Any

from configs.errors import InvalidRequest, shown
from configs.sampling import StructuredOutput
from server.protocol.common import GenerationRequest, StructuredOutputs


def structured_output(body: GenerationRequest) -> StructuredOutput | None:
    """Of response_format, structured_outputs and the guided_ fields, one. Raises `InvalidRequest` naming the field."""
    found = [
        (field, converted)
        for field, convert in _CONVERTERS.items()
        if (value := getattr(body, field)) is not None and (converted := convert(value)) is not None
    ]
    if any(not is_same(found[0][1], other) for _, other in found[1:]):  # clients write old and new names together
        names = " and ".join(field for field, _ in found)
        raise InvalidRequest(f"{names} exclude each other", param=found[1][0])
    return found[0][1] if found else None


def is_same(one: StructuredOutput, other: StructuredOutput) -> bool:
    if one.kind == other.kind == "json_schema":
        try:
            return bool(json.loads(one.source) == json.loads(other.source))
        except (ValueError, RecursionError):
            return one == other
    return one == other


def field_names(body: GenerationRequest) -> dict[str, str]:
    """Where the request's names differ from the engine's."""
    names = {}
    if field := next((field for field in _CONVERTERS if getattr(body, field) is not None), None):
        names["structured"] = field
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def response_format(value: dict[str, Any]) -> StructuredOutput | None:
    """OpenAI's response_format, also the form without `json_schema` around the schema that its Responses API has."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object")
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict | bool):
            raise InvalidRequest("response_format needs a JSON schema in json_schema.schema", param="response_format")
        return json_schema(schema)
    if kind == "structural_tag":
        return StructuredOutput("structural_tag", json.dumps(value))
    kinds = "text, json_object, json_schema or structural_tag"
    raise InvalidRequest(f"response_format.type must be {kinds}; got {shown(kind)}", param="response_format")


def json_schema(schema: str | bool | dict[str, Any]) -> StructuredOutput:
    return StructuredOutput("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _choice(texts: list[str]) -> StructuredOutput:
    return StructuredOutput("choice", json.dumps(texts))


def structured_outputs(value: StructuredOutputs) -> StructuredOutput | None:
    given: list[StructuredOutput] = []
    if value.json is not None:
        given.append(json_schema(value.json))
    if value.regex is not None:
        given.append(StructuredOutput("regex", value.regex))
    if value.choice is not None:
        given.append(_choice(value.choice))
    if value.grammar is not None:
        given.append(StructuredOutput("grammar", value.grammar))
    if value.json_object:
        given.append(StructuredOutput("json_object"))
    if (tag := value.structural_tag) is not None:
        given.append(StructuredOutput("structural_tag", tag if isinstance(tag, str) else json.dumps(tag)))
    if len(given) > 1:
        raise InvalidRequest("structured_outputs may hold one constraint", param="structured_outputs")
    return given[0] if given else None


_CONVERTERS: dict[str, Callable[[Any], StructuredOutput | None]] = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "guided_json": json_schema,
    "guided_regex": lambda regex: StructuredOutput("regex", regex),
    "guided_choice": _choice,
    "guided_grammar": lambda grammar: StructuredOutput("grammar", grammar),
}
"""By field of the request."""
