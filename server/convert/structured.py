"""What a request says about the language of its answer, as `StructuredOutput`."""

import json
from typing import Any

from configs.errors import InvalidRequest, shown
from configs.sampling import StructuredOutput
from server.protocol.common import StructuredOutputs


def is_same(one: StructuredOutput, other: StructuredOutput) -> bool:
    if one.kind == other.kind == "json_schema":
        try:
            return bool(json.loads(one.source) == json.loads(other.source))
        except (ValueError, RecursionError):
            return one == other
    return one == other


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
