"""One row of the table of routes, and the ASGI application that answers its requests."""

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from server.metrics.ledger import RECORD
from server.metrics.records import server_timing
from server.protocol.common import RequestBody

ANSWER_HEADERS = "octavo.answer_headers"
"""Key in the scope: the headers, as ASGI has them, that every answer carries, errors included."""

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
        serving, record = scope["app"].state.serving, scope[RECORD]
        record.route = self.path
        if is_work:
            serving.telemetry.ledger.begin_work(record, scope)
        with serving.working(scope) if is_work else contextlib.nullcontext():
            response = await operation.handler(Request(scope, receive))
            record.status = response.status_code
            response.raw_headers += scope[ANSWER_HEADERS]
            if timing := server_timing(record, time.monotonic()):
                response.raw_headers.append((b"server-timing", timing))
            await response(scope, receive, send)


class Paths:
    """Brings what clients write into the form that the table of routes has, before anything looks at a path.

    A slash at the end means nothing, and neither does `/v1` in front: some clients leave it out of their base URL, and
    some add it to one that has it.
    """

    def __init__(self, operations: list[Operation]) -> None:
        paths = {path for operation in operations for path in operation.paths.split()}
        self._known = {path for path in paths if "{" not in path}
        self._beginnings = tuple(path.partition("{")[0] for path in paths if "{" in path)

    def canonical(self, path: str) -> str:
        """A path that no route has stays as it is but for its end."""
        if path in self._known:
            return path
        path = path.rstrip("/") or "/"
        for one in (path, "/v1" + path, path.removeprefix("/v1")):
            if one in self._known or one.startswith(self._beginnings):
                return one
        return path


def routes_of(operations: list[Operation]) -> list[Route]:
    """One route per path, so that a wrong method is told all that the path has."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        for path in operation.paths.split():
            by_path.setdefault(path, {}).update(dict.fromkeys(operation.methods.split(), operation))
    return [_Route(path, Endpoint(path, by_method), methods=[*by_method]) for path, by_method in by_path.items()]


class _Route(Route):
    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """What is posted where a name stands means a route that there is not, rather than a thing of that name."""
        match, found = super().matches(scope)
        is_named = match is Match.PARTIAL and scope["method"] == "POST" and self.param_convertors
        return (Match.NONE, {}) if is_named else (match, found)
