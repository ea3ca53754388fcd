"""The HTTP application: routes around an engine, and errors as answers."""

import asyncio

from starlette.datastructures import State
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from configs.errors import InvalidRequest
from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from server.http_errors import error_response
from server.operation import ANSWER_HEADERS, Operation, Paths, routes_of
from server.route_table import operations
from server.security.guard import Guard
from server.serving import Serving


class Application:
    """Instead of Starlette's, which passes each piece of a stream through three layers that look for its start."""

    def __init__(self, serving: Serving, operations: list[Operation]) -> None:
        """Raises `SettingsError` for keys that cannot be read."""
        self.state = State({"serving": serving, "operations": operations})
        self.guard = Guard(serving.config, operations)
        self.paths = Paths(operations)
        self.router = Router(routes_of(operations), redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        scope["path"] = self.paths.canonical(scope["path"])
        ledger = self.state.serving.telemetry.ledger
        with ledger.following(scope) as record:
            try:
                response = self.guard.admit(scope)
                if response is None:
                    await self.router(scope, receive, send)
                    return
                record.status = response.status_code
            except ClientDisconnect:  # with half its request sent
                return
            except asyncio.CancelledError:  # at the server's end, with half its request read or prepared
                if record.status or self.state.serving.drained_by is None:
                    raise
                error = self.state.serving.shutting_down()
                response = error_response(Request(scope), error)
                ledger.note_error(record, error, response.status_code)
            except Exception as failure:
                error = failure
                if isinstance(failure, RecursionError):  # going through what a body nests
                    error = InvalidRequest("the body is nested too deeply")
                response = error_response(Request(scope), error)
                ledger.note_error(record, error, response.status_code)
            response.raw_headers += scope[ANSWER_HEADERS]
            await response(scope, receive, send)


def create_app(engine: AsyncEngine, config: ServerConfig, model_name: str) -> Application:
    """`engine` has started and is shut down by the caller. Raises `SettingsError` for keys that cannot be read."""
    return Application(Serving(engine, config, model_name), operations(config))
