"""Answers in pieces, in the OpenAPI document: FastAPI describes only those that are one JSON text."""

from typing import Any

from pydantic import ConfigDict, create_model

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
_REF = "#/components/schemas/{prefix}.{model}"
_pieces: list[Any] = []
"""Types of what is streamed, whose schemas are made with the document: they take a third of a second."""


def streamed(piece: Any, media_type: str = EVENTS) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers in pieces where the request asks for it.

    `piece` is the type of a line, or of an event's data: a class, or a `TypeAliasType` for a union. An event of
    `[DONE]` may end the stream.
    """
    _pieces.append(piece)
    described: dict[str, Any] = {"$ref": _REF.format(prefix=_prefix(piece), model=piece.__name__)}
    if media_type == EVENTS:
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": described}
        properties = {"event": {"type": "string"}, "data": {"anyOf": [data, {"const": "[DONE]"}]}}
        described = {"type": "object", "required": ["data"], "properties": properties}
    return {200: {"content": {media_type: {"schema": described}}}}


def definitions() -> dict[str, Any]:
    """The schemas that what is streamed refers to, for the document's components."""
    found: dict[str, Any] = {}
    for piece in _pieces:
        template = _REF.replace("{prefix}", _prefix(piece))
        holder = create_model("Piece", __config__=ConfigDict(use_attribute_docstrings=True), piece=(piece, ...))
        schema = holder.model_json_schema(mode="serialization", ref_template=template)
        found |= {f"{_prefix(piece)}.{name}": one for name, one in schema["$defs"].items()}
    return found


def _prefix(piece: Any) -> str:
    name: str = piece.__module__
    return name.removeprefix("server.")


def given(*names: str) -> dict[str, Any]:
    """The schema of an object that has all of these fields, none of them null."""
    return {"required": [*names], "properties": {name: {"not": {"type": "null"}} for name in names}}
