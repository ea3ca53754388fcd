"""The OpenAPI 3.1 document: what the table of routes and the structs of the wire say.

https://spec.openapis.org/oas/v3.1.1
"""

from typing import Any

import msgspec

from configs.settings import ServerConfig
from server.openapi.schemas import Schemas
from server.operation import Operation
from server.serving import Serving
from server.version import version


class Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: Error


JSON, EVENTS = "application/json", "text/event-stream"

_IGNORED = {
    "x-octavo-ignored-fields": {
        "description": "Fields of the body that no known API has, and that were ignored",
        "schema": {"type": "string"},
    }
}
_REASONS = {
    400: "The request cannot be honoured as it stands; `param` names the field",
    401: "The server has API keys, and the request brings none of them",
    404: "No such thing is served",
    408: "The time for the request is over",
    413: "The body is too large",
    429: "Too many requests wait already; `Retry-After` says when to come back",
    500: "A fault of the server's, or a model whose output is not a number",
    503: "Not now: the engine is gone or being started, or the server is shutting down",
}


def openapi_document(operations: list[Operation], serving: Serving) -> dict[str, Any]:
    schemas = Schemas(_types(operations), serving)
    keys = _keys(serving.config)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        for path in operation.paths.split():
            shown = path.replace(":path}", "}")
            for method in operation.methods.lower().split():
                paths.setdefault(shown, {})[method] = _operation(operation, shown, method, schemas, bool(keys))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version(), "description": f"Serves {serving.model.id}"},
        "paths": paths,
        "components": {"schemas": schemas.components, **keys},
    }


def _keys(config: ServerConfig) -> dict[str, Any]:
    if not config.api_key and config.api_key_file is None:
        return {}
    return {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}


def _types(operations: list[Operation]) -> list[Any]:
    types: dict[Any, None] = {ErrorResponse: None}
    for operation in operations:
        requests = [operation.body] if operation.body is not None else []
        types |= dict.fromkeys([*requests, *operation.answers, *operation.events])
    return list(types)


def _operation(operation: Operation, path: str, method: str, schemas: Schemas, with_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": f"{method}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "summary": operation.summary,
        "parameters": _path_parameters(path),
        "responses": _responses(operation, schemas),
    }
    if not operation.is_open and with_keys:
        described["security"] = [{"key": []}]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.ref(operation.body)}}}
    return described


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [piece.partition("}")[0] for piece in path.split("{")[1:]]
    text = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": text} for name in names]


def _responses(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {JSON: {"schema": schemas.any_of(operation.answers)}} if operation.answers else {}
    content |= {kind: {"schema": {"type": "string"}} for kind in operation.texts}
    if operation.events:
        content[EVENTS] = {"schema": _piece(operation, schemas)}
    answer: dict[str, Any] = {"description": "The answer", "content": content}
    if operation.body is not None:
        answer["headers"] = _IGNORED
    error = {JSON: {"schema": schemas.ref(ErrorResponse)}}
    errors = {str(one): {"description": _REASONS[one], "content": error} for one in operation.error_statuses}
    return {"200": answer, **{str(one): answer for one in operation.other_statuses}, **errors}


def _piece(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    """Of what comes piece by piece: one event."""
    piece = schemas.any_of(operation.events)
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": piece}
    fields = {"event": {"type": "string"}, "data": {"anyOf": [data, {"const": "[DONE]"}]}}
    return {"type": "object", "required": ["data"], "properties": fields}
