"""The HTTP application: routes around an engine, and errors as answers."""

from starlette.datastructures import State
from starlette.requests import Request
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from configs.settings import ServerConfig
from server.http_errors import error_response
from server.operation import Operation, routes_of
from server.route_table import operations
from server.serving import EngineFace, Serving


class Application:
    """Instead of Starlette's, which passes each piece of a stream through three layers that look for its start."""

    def __init__(self, serving: Serving, operations: list[Operation]) -> None:
        self.state = State({"serving": serving, "operations": operations})
        self.router = Router(routes_of(operations))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        try:
            await self.router(scope, receive, send)
        except Exception as error:
            await error_response(Request(scope), error)(scope, receive, send)


def create_app(engine: EngineFace, config: ServerConfig, model_name: str) -> Application:
    """`engine` has started and is shut down by the caller."""
    return Application(Serving(engine, config, model_name), operations(config))
