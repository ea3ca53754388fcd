"""Every error leaves as OpenAI's error object, or as the protocol's below whose paths it was asked for.

Those of the framework are among them.
"""

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import InvalidRequest, RequestError, ShuttingDown
from server.protocol.common import Error, ErrorResponse
from server.security.request_ids import CURRENT

logger = logging.getLogger(__name__)

ErrorBody = Callable[[Exception], bytes]
ERROR_BODY = "octavo.error_body"
"""Its key in the scope of a request."""


def error_object(error: Exception) -> Error:
    """What is not a `RequestError` is a fault of ours: logged, and told without detail."""
    if isinstance(error, RequestError):
        return Error(error.message, error.type, error.param, error.code)
    logger.error("request %s failed", CURRENT.get(), exc_info=error)
    return Error("internal error; see the server's log", "server_error")


def error_body(error: Exception) -> bytes:
    """The JSON of `error_object`."""
    return msgspec.json.encode(ErrorResponse(error_object(error)))


def error_response(request: Request, error: Exception) -> Response:
    """The answer to a request of which nothing was sent yet."""
    body_of: ErrorBody = request.scope.get(ERROR_BODY, error_body)
    if isinstance(error, HTTPException):  # unknown paths and methods
        reason = HTTPStatus(error.status_code).phrase
        content = InvalidRequest(f"{reason}: {request.method} {request.url.path}")
        return _json(body_of(content), error.status_code, error.headers)
    if not isinstance(error, RequestError):
        return _json(body_of(error), 500)
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if isinstance(error, ShuttingDown):
        headers["connection"] = "close"
    return _json(body_of(error), error.status, headers)


def _json(body: bytes, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
