"""Answers in pieces, in the OpenAPI document: FastAPI describes only those that are one JSON text."""

from typing import Any

from pydantic import ConfigDict, create_model

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
DEFINITIONS: dict[str, Any] = {}
"""Schemas that those of the pieces refer to, for the document's components."""


def streamed(piece: Any, media_type: str = EVENTS) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers in pieces where the request asks for it.

    `piece` is the type of a line, or of an event's data: a class, or a `TypeAliasType` for a union. An event of
    `[DONE]` may end the stream.
    """
    prefix = piece.__module__.removeprefix("server.")
    holder = create_model("Piece", __config__=ConfigDict(use_attribute_docstrings=True), piece=(piece, ...))
    schema = holder.model_json_schema(mode="serialization", ref_template=f"#/components/schemas/{prefix}.{{model}}")
    DEFINITIONS.update({f"{prefix}.{name}": one for name, one in schema.get("$defs", {}).items()})
    described = schema["properties"]["piece"]
    if media_type == EVENTS:
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": described}
        properties = {"event": {"type": "string"}, "data": {"anyOf": [data, {"const": "[DONE]"}]}}
        described = {"type": "object", "required": ["data"], "properties": properties}
    return {200: {"content": {media_type: {"schema": described}}}}


def given(*names: str) -> dict[str, Any]:
    """The schema of an object that has all of these fields, none of them null."""
    return {"required": [*names], "properties": {name: {"not": {"type": "null"}} for name in names}}
