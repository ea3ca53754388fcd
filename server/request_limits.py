"""The ASGI layer between uvicorn and the application: bounds on a request's head, and on the time of its body."""

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.errors import InvalidRequest, RequestError
from configs.settings import ServerConfig
from server.errors import error_response
from server.middleware import REQUEST_ID, request_id

BYTES_PER_SECOND = 16 * 2**10
"""Of a body, so many earn it another second to arrive in."""


class HeaderTooLarge(RequestError):
    status = 431
    type = "invalid_request_error"
    ends_connection = True


class RequestTimeout(RequestError):
    status = 408
    type = "timeout_error"
    ends_connection = True


class RequestLimits:
    """ASGI middleware; `app` gets requests whose heads are within the bounds."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self.app = app
        self.config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_head(scope)
        except RequestError as error:
            response = error_response(Request(scope), error)
            response.headers[REQUEST_ID.decode()] = request_id()
            await response(scope, receive, send)
        else:
            await self.app(scope, self._in_time(receive), send)

    def _check_head(self, scope: Scope) -> None:
        """Raises `RequestError`."""
        headers, config = scope["headers"], self.config
        if len(headers) > config.max_header_count:
            message = f"a request may have {config.max_header_count} headers; this one has {len(headers)}"
            raise HeaderTooLarge(message, code="too_many_headers")
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(n) + len(v) for n, v in headers)
        if num_bytes > config.max_header_bytes:
            message = f"a request's target and headers may have {config.max_header_bytes} bytes"
            raise HeaderTooLarge(message, code="header_too_large")
        num_hosts = [name for name, _ in headers].count(b"host")
        if num_hosts > 1 or (not num_hosts and scope["http_version"] != "1.0"):  # as RFC 9112, 3.2, asks
            raise InvalidRequest("a request must have one header Host", code="invalid_http")

    def _in_time(self, receive: Receive) -> Receive:
        """`receive`, which raises `RequestTimeout` where the body takes too long. What follows it has no bound."""
        timeout = self.config.request_read_timeout
        deadline = asyncio.get_running_loop().time() + timeout
        is_whole = False

        async def receive_in_time() -> Message:
            nonlocal deadline, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                error = RequestTimeout(f"the request did not arrive within {timeout:g} s", code="request_timeout")
                raise error from None
            deadline += len(message.get("body", b"")) / BYTES_PER_SECOND
            is_whole = not message.get("more_body", False)
            return message

        return receive_in_time
