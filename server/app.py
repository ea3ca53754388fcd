"""The HTTP application: routes and error handlers around an engine."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from configs.errors import RequestError
from configs.settings import ServerConfig
from server.http_errors import on_exception, on_http_exception, on_request_error
from server.routes.chat import ChatRoute
from server.routes.completions import CompletionsRoute
from server.routes.models import health, list_models, retrieve_model
from server.serving import EngineFace, Serving


def create_app(engine: EngineFace, config: ServerConfig, model_name: str) -> Starlette:
    """`engine` has started and is shut down by the caller."""
    completions = CompletionsRoute(config.max_body_bytes)
    chat = ChatRoute(config.max_body_bytes)
    app = Starlette(
        routes=[
            Route("/v1/completions", completions.__call__, methods=["POST"]),
            Route("/v1/chat/completions", chat.__call__, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{model_id:path}", retrieve_model),
            Route("/health", health),
        ],
        exception_handlers={
            RequestError: on_request_error,
            HTTPException: on_http_exception,
            Exception: on_exception,
        },
    )
    app.state.serving = Serving(engine, config, model_name)
    return app
