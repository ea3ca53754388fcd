"""What the server says about itself, and of what it serves: GET /, /health, /v1/models, /version and their kin."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server import version
from server.bodies import BodyRoute
from server.errors import ErrorResponse
from server.metrics.prometheus import OPENMETRICS, TEXT
from server.page import INDEX, PAGE
from server.serving import Model, Serving, ServingOf

router = APIRouter(route_class=BodyRoute, tags=["Server"])


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Entrance(Answer):
    """Where to look; nothing of what is served, since it is answered without a key."""

    name: str = "Octavo"
    openapi: str = "/openapi.json"
    health: str = "/health"


class Health(Answer):
    """Times are seconds."""

    status: Literal["ok", "restarting", "frozen", "stuck", "dead", "draining"]
    reason: str | None = None
    """Where the status is not `ok`."""
    beat_age: float
    """Since the engine process showed that it runs."""
    step_age: float
    """Of the step that the engine is at; 0 between steps."""
    num_steps: int
    """Of this engine process."""


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool = False
    first_id: str
    last_id: str


class Version(Answer):
    version: str


class Load(Answer):
    server_load: int
    """Requests with a body that are being answered now, and responses in the background."""


class TokenizerInfo(Answer):
    """What a client without a tokenizer of its own may want to know of the server's."""

    tokenizer_class: str = "octavo"
    vocab_size: int
    model_max_length: int
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None


class ServerInfo(Answer):
    """No paths and no settings: they may tell secrets."""

    version: str
    model: str
    """The served name."""
    architecture: str
    num_parameters: int
    max_model_len: int
    vocab_size: int
    dtype: str
    quantization: str
    device: str
    attention_backend: str
    num_threads: int
    kv_cache_dtype: str
    kv_cache_tokens: int
    """Tokens that the KV cache holds."""
    block_size: int
    """Tokens in one block of the KV cache."""


UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not now, with the reason"}}
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": ErrorResponse, "description": "No such thing is served"}}


@router.get("/", response_model=Entrance)
async def entrance(request: Request, serving: ServingOf) -> Response:
    """The page for browsers; other clients, which want to see that somebody is there, get a few words."""
    wants_page = serving.config.page and "text/html" in request.headers.get("accept", "")
    words = JSONResponse(Entrance().model_dump())
    response = await PAGE.get_response(INDEX, request.scope) if wants_page else words
    response.headers["vary"] = "Accept"
    return response


@router.get("/health", response_model=Health, responses=UNAVAILABLE)
@router.get("/health/ready", response_model=Health, responses=UNAVAILABLE)
@router.get("/ping", response_model=Health, responses=UNAVAILABLE)
@router.post("/ping", response_model=Health, responses=UNAVAILABLE)
async def ready(serving: ServingOf) -> Response:
    """200 while a completion would be answered; 503 otherwise, with the reason."""
    return _health(serving, "ok")


@router.get("/health/live", response_model=Health, responses=UNAVAILABLE)
async def live(serving: ServingOf) -> Response:
    """503 when only another server process would help: a restart of the engine is under way, or none was of use."""
    return _health(serving, "ok", "restarting", "draining")


def _health(serving: Serving, *good: str) -> Response:
    """200 where the status is one of the good ones."""
    engine, is_draining = serving.engine.health(), serving.drained_by is not None
    health = Health(
        status="draining" if is_draining else engine.status,
        reason="the server finishes what runs, and then ends" if is_draining else engine.reason or None,
        beat_age=round(engine.beat_age, 3),
        step_age=round(engine.step_age, 3),
        num_steps=engine.num_steps,
    )
    return JSONResponse(health.model_dump(exclude_none=True), 200 if health.status in good else 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {TEXT: {}, OPENMETRICS: {}}}})
async def metrics(request: Request, serving: ServingOf) -> Response:
    """Metrics for Prometheus."""
    content, media_type = serving.metrics.document(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": media_type, "cache-control": "no-store"})


@router.get("/v1/models")
async def list_models(serving: ServingOf) -> ModelList:
    """The served model, under each of its names."""
    models = [*serving.models.values()]
    return ModelList(data=models, first_id=models[0].id, last_id=models[-1].id)


@router.get("/v1/models/{model_id:path}", responses=NOT_FOUND)
async def retrieve_model(model_id: str, serving: ServingOf) -> Model:
    """The served model, by one of its names."""
    return serving.check_model(model_id)


@router.get("/version")
async def show_version() -> Version:
    """Octavo's version."""
    return Version(version=version())


@router.get("/load")
async def load(serving: ServingOf) -> Load:
    """How many requests are being answered."""
    return Load(server_load=serving.num_running)


@router.get("/server_info")
async def server_info(serving: ServingOf) -> ServerInfo:
    """What is served, and on what."""
    return ServerInfo(version=version(), model=serving.model.id, **msgspec.structs.asdict(serving.engine.info))


@router.get("/tokenizer_info")
async def tokenizer_info(serving: ServingOf) -> TokenizerInfo:
    """Special tokens and chat template."""
    engine, info = serving.engine, serving.engine.info
    return TokenizerInfo(
        vocab_size=info.vocab_size,
        model_max_length=info.max_model_len,
        chat_template=engine.chat_template,
        **engine.tokenizer.special_tokens,
    )
