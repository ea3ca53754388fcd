"""Every error leaves in the form of the protocol that was asked: OpenAI's, Anthropic's or Ollama's."""

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest, RequestError
from server.metrics.records import current_request_id

logger = logging.getLogger(__name__)

_ANTHROPIC_TYPES = {
    "model_not_found": "not_found_error",
    "body_too_large": "request_too_large",
    "invalid_api_key": "authentication_error",
    "origin_not_allowed": "permission_error",
    **dict.fromkeys(("shutting_down", "engine_restarting", "engine_frozen", "engine_stuck"), "overloaded_error"),
}
"""By code, where Anthropic's clients look for another type than OpenAI's."""


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    """The field of the request that is at fault."""
    code: str | None


class ErrorResponse(TypedDict):
    """OpenAI's form; Anthropic's has `"type": "error"` beside it."""

    error: ErrorObject


class OllamaError(TypedDict):
    error: str


def error_object(error: Exception) -> ErrorObject:
    """What is not a `RequestError` is a fault of ours: it is logged, and told without detail."""
    if isinstance(error, RequestError):
        return {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    logger.error("request %s failed", current_request_id(), exc_info=error)
    message = "internal error; see the server's log"
    return {"message": message, "type": "server_error", "param": None, "code": None}


def openai_error(error: Exception) -> bytes:
    return msgspec.json.encode({"error": error_object(error)})


def anthropic_error(error: Exception) -> bytes:
    """OpenAI's error object with the type that Anthropic's clients look for, so that both find theirs."""
    told = error_object(error)
    known = _ANTHROPIC_TYPES.get(told["code"] or "")
    told["type"] = known or ("api_error" if told["type"] == "server_error" else told["type"])
    return msgspec.json.encode({"type": "error", "error": told})


def ollama_error(error: Exception) -> bytes:
    """Ollama's clients take a text only, which here names the field too."""
    told = error_object(error)
    param, message = told["param"], told["message"]
    return msgspec.json.encode({"error": message if param is None or param in message else f"{param}: {message}"})


_BODIES: dict[str, Callable[[Exception], bytes]] = {"/v1/messages": anthropic_error, "/api/": ollama_error}
"""By the beginnings of paths; others have OpenAI's form."""


def error_response(request: Request, error: Exception) -> Response:
    """The answer to a request of which nothing was sent yet."""
    headers: dict[str, str] = {}
    status = 500
    if isinstance(error, HTTPException):  # unknown paths and methods
        status, headers = error.status_code, dict(error.headers or {})
        error = InvalidRequest(f"{HTTPStatus(status).phrase}: {request.method} {request.url.path}")
    elif isinstance(error, RequestError):
        status = error.status
        if error.retry_after is not None:
            headers["retry-after"] = str(error.retry_after)
        if error.ends_connection:
            headers["connection"] = "close"
        if status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = 'Bearer realm="Octavo"'
    path = request.scope["path"]
    body_of = next((form for prefix, form in _BODIES.items() if path.startswith(prefix)), openai_error)
    return Response(body_of(error), status, headers, media_type="application/json")


def error_statuses(*others: int, form: type = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says of the errors of a route: those that every body may get, and `others`."""
    statuses = sorted({*_OF_EVERY_BODY, *others})
    return {status: {"description": _REASONS[status], "model": form} for status in statuses}


_OF_EVERY_BODY = (400, 401, 404, 408, 413, 429, 500, 503)
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
