"""One row of the table of routes, and the ASGI application that answers its requests."""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from server.metrics.records import CURRENT_REQUEST
from server.protocol.common import RequestBody

Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request, or raises `RequestError`."""


@dataclass(frozen=True)
class Operation:
    """What is registered, and what the OpenAPI document tells of it."""

    methods: str
    """One or more, with spaces between."""
    paths: str
    """As `methods`; starlette's, with parameters in braces."""
    handler: Handler
    summary: str
    answers: tuple[Any, ...]
    """Types of the JSON with status 200."""
    body: type[RequestBody] | None = None
    events: tuple[Any, ...] = ()
    """Types of what comes piece by piece, if the request asks for that."""
    texts: tuple[str, ...] = ()
    """Media types of answers that are no JSON."""
    other_statuses: tuple[int, ...] = ()
    """Of answers of the same types."""
    errors: tuple[int, ...] = ()
    """Statuses beside those that every body may get."""
    is_open: bool = False
    """Answered without a key."""

    @property
    def error_statuses(self) -> list[int]:
        key = () if self.is_open else (401,)
        return sorted({500, *key, *self.errors, *((400, 404, 408, 413, 429, 503) if self.body else ())})


class Endpoint:
    """The ASGI application of one path. Raises what a handler raises, before it sends anything."""

    def __init__(self, path: str, operations: dict[str, Operation]) -> None:
        """By method."""
        self.path = path.replace(":path}", "}")
        self.operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self.operations["GET" if scope["method"] == "HEAD" else scope["method"]]
        is_work = operation.body is not None
        serving, record = scope["app"].state.serving, CURRENT_REQUEST.get()
        record.route = self.path
        if is_work:
            serving.requests.begin_work(record, scope)
        with serving.working(scope) if is_work else contextlib.nullcontext():
            response = await operation.handler(Request(scope, receive))
            await response(scope, receive, send)


def routes_of(operations: list[Operation]) -> list[Route]:
    """One route per path, so that a wrong method is told all that the path has."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        for path in operation.paths.split():
            by_path.setdefault(path, {}).update(dict.fromkeys(operation.methods.split(), operation))
    return [Route(path, Endpoint(path, by_method), methods=[*by_method]) for path, by_method in by_path.items()]
