"""The HTTP application: FastAPI with the routers of all protocols around one engine."""

import functools
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from configs.errors import RequestError
from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from server import admin, tokenization, version
from server.anthropic import routes as anthropic
from server.bodies import invalid_parameter
from server.documented import schemas
from server.errors import error_response
from server.llama_cpp import routes as llama_cpp
from server.metrics import live, timeline
from server.metrics.records import CURRENT_REQUEST
from server.middleware import OPEN, Admission, Paths, RequestMiddleware
from server.ollama import catalog as ollama_catalog
from server.ollama import chat as ollama_chat
from server.openai import chat, completions, embeddings
from server.openai.responses import routes as responses
from server.page import PAGE
from server.serving import Serving

PROTOCOLS = (
    *(chat, completions, responses, embeddings, anthropic, llama_cpp),
    *(ollama_chat, ollama_catalog, tokenization, live, timeline, admin),
)


def create_app(engine: AsyncEngine, config: ServerConfig, model_name: str) -> FastAPI:
    """`engine` has started and is shut down by the caller. Raises `SettingsError` for keys that cannot be read."""
    serving = Serving(engine, config, model_name)
    app = FastAPIOffline(
        title="Octavo",
        version=version(),
        redoc_url=None,
        static_url="/page/docs",
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours is in server/metrics
    )
    app.state.serving = serving
    app.state.live = live.LiveView(serving)
    app.state.responses = responses.ResponseStore(config)
    app.openapi = functools.cache(functools.partial(_openapi, app.openapi, config))  # type: ignore[method-assign]

    def document(request: Request) -> Response:
        return JSONResponse(app.openapi())

    # before FastAPI's own, which takes the event loop: a plain function runs in a thread
    app.router.routes.insert(0, Route("/openapi.json", document, include_in_schema=False))
    for protocol in PROTOCOLS:
        app.router.routes += protocol.router.routes  # `include_router` wraps each route
    if config.page:
        app.mount("/page", PAGE)
    routes = [route for route in app.router.routes if isinstance(route, Route)]

    async def answer_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            error = _wrong_method(request, routes) or error
        if isinstance(error, RequestValidationError):
            error = invalid_parameter(error)
        response = error_response(request, error)
        serving.requests.note_error(CURRENT_REQUEST.get(), error, response.status_code)
        return response

    for kind in (HTTPException, RequestError, RequestValidationError):
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(
        RequestMiddleware,
        serving=serving,
        admission=Admission(config),
        paths=Paths(route.path for route in routes),
    )
    return app


def _wrong_method(request: Request, routes: list[Route]) -> HTTPException | None:
    """Tells all methods of the path. What is posted where a name stands means a route that there is not."""
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    if not found:  # it is a file's
        return None
    if request.method == "POST" and all(route.param_convertors for route in found):
        return HTTPException(404)
    methods = {method for route in found for method in route.methods or ()}
    return HTTPException(405, headers={"allow": ", ".join(sorted(methods))})


def _openapi(generate: Callable[[], dict[str, Any]], config: ServerConfig) -> dict[str, Any]:
    """FastAPI's document, with the schemas of bodies and answers, and with what needs a key where there are any."""
    described = schemas()
    document = generate()
    document["components"] = {"schemas": described}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own: here it is 400
    if config.api_key or config.api_key_file is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in document["paths"].keys() - OPEN:
            for operation in document["paths"][path].values():
                operation["security"] = [{"key": []}]
    return document
