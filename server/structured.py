"""What a request says about the language of its answer: response_format, structured_outputs and the guided_ fields."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.sampling import StructuredOutput
from server.bodies import RequestBody

JsonSchema = dict[str, Any] | bool

OPEN = with_config(ConfigDict(strict=True, extra="allow"))
"""Decorates structures within closed ones, and answers: they may have other keys, as bodies and what these hold may."""
CLOSED = with_config(ConfigDict(strict=True, extra="forbid"))
"""Decorates structures that have no other keys."""


@CLOSED
class StructuredOutputs(TypedDict):
    """vLLM's way to say which language the answer belongs to: one of these."""

    json: NotRequired[str | JsonSchema | None]
    """A JSON schema, or its text."""
    regex: NotRequired[str | None]
    choice: NotRequired[list[str] | None]
    grammar: NotRequired[str | None]
    """EBNF with a rule `root`."""
    json_object: NotRequired[bool | None]
    structural_tag: NotRequired[str | dict[str, Any] | None]
    """xgrammar's: parts of the text begin with a trigger and belong to a language of their own."""


@OPEN
class PlainFormat(TypedDict):
    type: Literal["text", "json_object"]


class StructuralTagFormat(TypedDict):
    type: Literal["structural_tag"]


class NamedSchema(TypedDict):
    schema: JsonSchema


class JsonSchemaFormat(TypedDict):
    """With the schema in `json_schema`, or beside the type, as OpenAI's Responses API has it."""

    type: Literal["json_schema"]
    json_schema: NotRequired[NamedSchema]
    schema: NotRequired[JsonSchema]


ResponseFormat = Annotated[PlainFormat | StructuralTagFormat | JsonSchemaFormat, Field(discriminator="type")]


def response_format(value: ResponseFormat) -> StructuredOutput | None:
    """The language of a format; None for any text. Raises `InvalidRequest` for a format without its schema."""
    if value["type"] == "text":
        return None
    if value["type"] == "json_object":
        return StructuredOutput("json_object")
    if value["type"] == "structural_tag":
        return StructuredOutput("structural_tag", json.dumps(value))
    named = value.get("json_schema")
    schema = value.get("schema") if named is None else named["schema"]
    if schema is None:
        raise InvalidRequest("response_format needs a JSON schema in json_schema.schema", param="response_format")
    return json_schema(schema)


def json_schema(schema: str | JsonSchema) -> StructuredOutput:
    return _of_kind("json_schema", schema)


def _of_kind(kind: Any, value: Any) -> StructuredOutput:
    return StructuredOutput(kind, value if isinstance(value, str) else json.dumps(value))


_KINDS = {"json": "json_schema", **{name: name for name in ("regex", "choice", "grammar", "structural_tag")}}
"""Of the constraints that have a value, by their names in `structured_outputs`."""


def structured_outputs(value: StructuredOutputs) -> StructuredOutput | None:
    """The language that the constraint describes. Raises `InvalidRequest` for more than one."""
    given = [_of_kind(_KINDS[name], one) for name, one in value.items() if name in _KINDS and one is not None]
    if value.get("json_object"):
        given.append(StructuredOutput("json_object"))
    if len(given) > 1:
        raise InvalidRequest("structured_outputs may hold one constraint", param="structured_outputs")
    return given[0] if given else None


_FIELDS: dict[str, Callable[[Any], StructuredOutput | None]] = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    **{f"guided_{name}": partial(_of_kind, _KINDS[name]) for name in ("json", "regex", "choice", "grammar")},
}


def structured_output(body: RequestBody) -> StructuredOutput | None:
    """The language that one of these fields gives. Raises `InvalidRequest` naming one of two that contradict."""
    found = [
        (field, converted)
        for field, convert in _FIELDS.items()
        if (value := getattr(body, field)) is not None and (converted := convert(value)) is not None
    ]
    if any(not _is_same(found[0][1], other) for _, other in found[1:]):  # clients write old and new names together
        names = " and ".join(field for field, _ in found)
        raise InvalidRequest(f"{names} exclude each other", param=found[1][0])
    return found[0][1] if found else None


def structured_field(body: RequestBody) -> str | None:
    """The field that gives the language, found without a look into schemas, which may be large."""
    given = {field: value for field in _FIELDS if (value := getattr(body, field)) is not None}
    if given.get("response_format", {}).get("type") == "text":
        del given["response_format"]
    return next(iter(given), None)


def _is_same(one: StructuredOutput, other: StructuredOutput) -> bool:
    if one.kind == other.kind == "json_schema":
        with suppress(ValueError, RecursionError):
            return bool(json.loads(one.source) == json.loads(other.source))
    return one == other
