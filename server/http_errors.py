"""Every error leaves as OpenAI's error object, those of the framework included."""

import logging
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import RequestError
from server.protocol.common import Error, ErrorResponse

logger = logging.getLogger(__name__)


def error_body(error: Exception) -> bytes:
    """The JSON of an error; what is not a `RequestError` is a fault of ours: logged, and told without detail."""
    if isinstance(error, RequestError):
        content = Error(error.message, error.type, error.param, error.code)
    else:
        logger.error("a request failed", exc_info=error)
        content = Error("internal error; see the server's log", "server_error")
    return msgspec.json.encode(ErrorResponse(content))


def error_response(request: Request, error: Exception) -> Response:
    """The answer to a request of which nothing was sent yet."""
    if isinstance(error, HTTPException):  # unknown paths and methods
        reason = HTTPStatus(error.status_code).phrase
        content = Error(f"{reason}: {request.method} {request.url.path}", "invalid_request_error")
        return _json(msgspec.json.encode(ErrorResponse(content)), error.status_code, error.headers)
    return _json(error_body(error), error.status if isinstance(error, RequestError) else 500)


def _json(body: bytes, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
