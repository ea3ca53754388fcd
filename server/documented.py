"""Schemas in the OpenAPI document. They are made when it is asked for: at every start they took a second."""

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema
from typing_extensions import get_original_bases

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
_references: list[tuple[dict[str, Any], Any, Literal["validation", "serialization"]]] = []


def reference(kind: Any, mode: Literal["validation", "serialization"] = "serialization") -> dict[str, Any]:
    """The schema of a type, which is empty until `schemas` has been called. `mode` is pydantic's: bodies are validated,
    answers serialised."""
    schema: dict[str, Any] = {}
    _references.append((schema, kind, mode))
    return schema


def schemas() -> dict[str, Any]:
    """Fills in every reference; what they refer to, by name, for the document's components."""
    adapters = [(str(number), mode, TypeAdapter[Any](kind)) for number, (_, kind, mode) in enumerate(_references)]
    found, definitions = TypeAdapter.json_schemas(
        adapters, ref_template="#/components/schemas/{model}", schema_generator=_WithDocstrings
    )
    for number, (schema, _, mode) in enumerate(_references):
        schema |= found[str(number), mode]
    return definitions["$defs"]  # type: ignore[no-any-return]


class _WithDocstrings(GenerateJsonSchema):
    """Describes fields by their docstrings, as `use_attribute_docstrings` does, which reads them from the sources of
    each class at every start."""

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        return _described(super().model_schema(schema), schema["cls"])

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> dict[str, Any]:
        return _described(super().typed_dict_schema(schema), schema["cls"])


def _described(schema: dict[str, Any], kind: type) -> dict[str, Any]:
    del schema["title"]  # generators of clients name classes by it, and some stand in several modules
    for name, text in _field_docstrings(kind).items():
        if name in schema["properties"]:
            schema["properties"][name].setdefault("description", text)
    return schema


@cache
def _field_docstrings(kind: type) -> dict[str, str]:
    """Its own, and those of what it inherits from."""
    bases = [base for base in get_original_bases(kind) if getattr(base, "__module__", "").startswith(__package__)]
    inherited = {name: text for base in bases for name, text in _field_docstrings(base).items()}
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    own = {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    return inherited | own


def streamed(piece: Any, media_type: str = EVENTS) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers in pieces where the request asks for it.

    `piece` is the type of a line, or of an event's data. An event of `[DONE]` may end the stream.
    """
    described = reference(piece)
    if media_type == EVENTS:
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": described}
        properties = {"event": {"type": "string"}, "data": {"anyOf": [data, {"const": "[DONE]"}]}}
        described = {"type": "object", "required": ["data"], "properties": properties}
    return {200: {"content": {media_type: {"schema": described}}}}


def given(*names: str) -> dict[str, Any]:
    """The schema of an object that has all of these fields, none of them null."""
    return {"required": [*names], "properties": {name: {"not": {"type": "null"}} for name in names}}
