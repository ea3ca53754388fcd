"""One row of the table of routes, and the ASGI application that answers its requests."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

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
    query: type | None = None
    """A struct with the parameters of the query."""
    events: tuple[Any, ...] = ()
    """Types of what comes piece by piece, if the request asks for that."""
    events_type: str = "text/event-stream"
    errors: tuple[int, ...] = ()
    """Statuses beside those that every body may get."""

    @property
    def error_statuses(self) -> list[int]:
        return sorted({500, *self.errors, *((400, 404, 413, 503) if self.body else ())})


class Endpoint:
    """The ASGI application of one path. Raises what a handler raises, before it sends anything."""

    def __init__(self, operations: dict[str, Operation]) -> None:
        """By method."""
        self.operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self.operations["GET" if scope["method"] == "HEAD" else scope["method"]]
        is_work = operation.body is not None
        serving = scope["app"].state.serving
        serving.num_running += is_work
        try:
            response = await operation.handler(Request(scope, receive))
            await response(scope, receive, send)
        finally:
            serving.num_running -= is_work


def routes_of(operations: list[Operation]) -> list[Route]:
    """One route per path, so that a wrong method is told all that the path has."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        for path in operation.paths.split():
            by_path.setdefault(path, {}).update(dict.fromkeys(operation.methods.split(), operation))
    return [Route(path, Endpoint(by_method), methods=[*by_method]) for path, by_method in by_path.items()]
