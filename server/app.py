"""The HTTP application: routes around an engine, and errors as answers."""

from collections.abc import Awaitable, Callable

from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from configs.settings import ServerConfig
from server.http_errors import error_response
from server.routes.chat import ChatRoute
from server.routes.completions import CompletionsRoute
from server.routes.models import health, list_models, retrieve_model
from server.serving import EngineFace, Serving


class Application:
    """Instead of Starlette's, which passes each piece of a stream through three layers that look for its start."""

    def __init__(self, serving: Serving, routes: list[Route]) -> None:
        self.state = State({"serving": serving})
        self.router = Router(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        try:
            await self.router(scope, receive, send)
        except Exception as error:
            await error_response(Request(scope), error)(scope, receive, send)


class Endpoint:
    """An ASGI application that answers one kind of request. Raises what `answer` raises, before it sends anything."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.answer(Request(scope, receive))
        await response(scope, receive, send)


def create_app(engine: EngineFace, config: ServerConfig, model_name: str) -> Application:
    """`engine` has started and is shut down by the caller."""
    routes = [
        Route("/v1/completions", Endpoint(CompletionsRoute(config.max_body_bytes)), methods=["POST"]),
        Route("/v1/chat/completions", Endpoint(ChatRoute(config.max_body_bytes)), methods=["POST"]),
        Route("/v1/models", Endpoint(list_models), methods=["GET"]),
        Route("/v1/models/{model_id:path}", Endpoint(retrieve_model), methods=["GET"]),
        Route("/health", Endpoint(health), methods=["GET"]),
    ]
    return Application(Serving(engine, config, model_name), routes)
