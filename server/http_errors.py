"""Every error leaves as OpenAI's error object, those of the framework included."""

import logging
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import RequestError
from server.protocol.common import Error, ErrorResponse

logger = logging.getLogger(__name__)


def error_body(error: Exception) -> bytes:
    """The JSON of an error; what is not a `RequestError` is a fault of ours and told without detail."""
    content = Error("internal error; see the server's log", "server_error")
    if isinstance(error, RequestError):
        content = Error(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(ErrorResponse(content))


def stream_error_body(error: Exception) -> bytes:
    """`error_body` for a response that has started, where nobody else logs what went wrong."""
    if not isinstance(error, RequestError):
        logger.error("a stream failed", exc_info=error)
    return error_body(error)


async def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), error
    return _json(error_body(error), error.status)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException), error
    reason = HTTPStatus(error.status_code).phrase
    content = Error(f"{reason}: {request.method} {request.url.path}", "invalid_request_error")
    body = msgspec.json.encode(ErrorResponse(content))
    return _json(body, error.status_code, dict(error.headers or {}))


async def on_exception(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, and uvicorn logs it."""
    return _json(error_body(error), 500)


def _json(body: bytes, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
