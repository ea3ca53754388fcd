"""Ollama's /api/embed and /api/embeddings, and what its API says of the model, of which there is the served one."""

import hashlib
import json
import re
import time
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from engine.bundled import BUNDLED
from server.answers.styles import style_of
from server.bodies import BodyRoute, ParsedRequest, Unsupported
from server.documented import LINES, streamed
from server.errors import OllamaError, error_statuses
from server.ollama.chat import OllamaBody
from server.openai.base import Timeout
from server.openai.embeddings import PoolingFields, embedded, filled, prompts_of, shaped
from server.serving import Serving, ServingOf

router = APIRouter(route_class=BodyRoute, tags=["Ollama"], responses=error_statuses(form=OllamaError))

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients decide by it what they may ask for."""
_FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BITS = {"F32": 32, "int8": 8, "int4": 4}
"""Of one parameter; 16 for those that are not here."""
_UNITS = (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0), ("", 1, 0))
"""Of numbers of parameters, with the decimals to which Ollama rounds."""


class NamedModelRequest(OllamaBody):
    name: str | None = None
    """The older name of `model`."""


class PullRequest(NamedModelRequest):
    stream: bool | None = None
    """Default true."""
    insecure: Any = None
    username: Any = None
    password: Any = None


class ShowRequest(NamedModelRequest):
    verbose: Any = None
    options: Annotated[Any, Unsupported(({},))] = None
    system: Annotated[Any, Unsupported(("",))] = None
    template: Annotated[Any, Unsupported(("",))] = None


class EmbeddingBody(OllamaBody):
    timeout_s: Timeout | None = None
    """Seconds until the request fails with 408; the server may have a bound of its own."""
    keep_alive: Any = None
    options: Any = None


class EmbedRequest(EmbeddingBody):
    input: str | list[str] | None = None
    """Without any, nothing is embedded."""
    truncate: bool | None = None
    """False: refuse what the context does not hold. Else the end of each text is cut off."""
    dimensions: Annotated[int, Field(ge=0)] | None = None
    """Keep only this many numbers of each embedding, the first; they are scaled to length 1 again. 0 keeps all."""


class SingleEmbeddingRequest(EmbeddingBody):
    prompt: str | None = None
    """Without one, nothing is embedded. What the context does not hold is cut off."""


class EmbedResponse(TypedDict):
    """Durations are nanoseconds; the count is of tokens."""

    model: str
    embeddings: list[list[float]]
    """Scaled to (Euclidean) length 1."""
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class SingleEmbedding(TypedDict):
    embedding: list[float]


class PullStatus(TypedDict):
    status: Literal["success"]


class OllamaVersion(TypedDict):
    version: str


class OllamaDetails(TypedDict):
    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    name: str
    model: str
    size: int
    """Bytes of the parameters, about."""
    digest: str
    details: OllamaDetails
    modified_at: NotRequired[str]
    expires_at: NotRequired[str]
    size_vram: NotRequired[int]
    context_length: NotRequired[int]


class OllamaModels(TypedDict):
    models: list[OllamaModel]


class ShowResponse(TypedDict):
    modelfile: str
    parameters: str
    """Sampling defaults, a name and a value in each line."""
    template: str
    """The chat template, in Jinja."""
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


@router.post("/api/embed", response_model=EmbedResponse)
async def embed(body: EmbedRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Embed texts; without any, the model is only loaded."""
    begun = time.perf_counter_ns()
    texts = [body.input] if isinstance(body.input, str) and body.input else body.input or []
    vectors, num_tokens = await _vectors(body, request, serving, "input", texts, may_cut=body.truncate is not False)
    shapes = shaped(vectors, body.dimensions or None, normalize=True, as_base64=False) if vectors else ()
    head = {
        "model": serving.model.id,
        "total_duration": time.perf_counter_ns() - begun,
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return Response(await filled(head, "embeddings", shapes), media_type="application/json")


@router.post("/api/embeddings", response_model=SingleEmbedding)
async def single_embedding(body: SingleEmbeddingRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Embed one text, in the older form: the embedding has the length that the model gives it."""
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await _vectors(body, request, serving, "prompt", texts)
    return Response(msgspec.json.encode({"embedding": vectors[0] if vectors else []}), media_type="application/json")


async def _vectors(
    body: EmbeddingBody, request: ParsedRequest, serving: Serving, field: str, texts: list[str], *, may_cut: bool = True
) -> tuple[list[list[float]], int]:
    """The embeddings of the texts as the model gives them, and the number of tokens."""
    if not texts:
        return [], 0
    fields = PoolingFields(
        timeout_s=body.timeout_s, truncate_prompt_tokens=-1 if may_cut else None, truncation_side="right"
    )
    inputs = {field: (texts, None)}
    head, vectors = await embedded(request, serving, fields, lambda: prompts_of(serving, fields, inputs), "embd-")
    return vectors, head["usage"]["prompt_tokens"]


@router.get("/api/tags")
async def list_models(serving: ServingOf) -> OllamaModels:
    """The served model, under each of its names."""
    return {"models": [{**_model(serving, name), "modified_at": serving.model.created_at} for name in serving.models]}


@router.get("/api/ps")
async def list_running(serving: ServingOf) -> OllamaModels:
    """The loaded model."""
    model = _model(serving, serving.model.id)
    model["expires_at"] = "9999-12-31T23:59:59Z"
    model["size_vram"] = model["size"] if serving.engine.info.device.startswith("cuda") else 0
    model["context_length"] = serving.model.max_model_len
    return {"models": [model]}


@router.get("/api/version")
async def show_version() -> OllamaVersion:
    """The version of Ollama whose API this is."""
    return {"version": API_VERSION}


@router.post("/api/show", response_model=ShowResponse)
async def show(body: ShowRequest, serving: ServingOf) -> Response:
    """What the model is."""
    serving.check_model(body.model or body.name)
    engine, details = serving.engine, _details(serving)
    shown: ShowResponse = {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in engine.default_sampling.items()),
        "template": engine.chat_template or "",
        "details": details,
        "model_info": {
            "general.architecture": details["family"],
            "general.parameter_count": engine.info.num_parameters,
            f"{details['family']}.context_length": serving.model.max_model_len,
        },
        "capabilities": ["completion", *await _capabilities(serving)],
        "modified_at": serving.model.created_at,
    }
    return JSONResponse(shown)


@router.post("/api/pull", response_model=PullStatus, responses=streamed(PullStatus, LINES))
async def pull(body: PullRequest, serving: ServingOf) -> Response:
    """Say that the served model is there; no other can be had."""
    serving.check_model(body.model or body.name)
    status: PullStatus = {"status": "success"}
    return JSONResponse(status) if body.stream is False else Response(json.dumps(status) + "\n", media_type=LINES)


@router.post("/api/copy")
@router.post("/api/create")
@router.post("/api/push")
@router.delete("/api/delete")
async def refuse_changes(request: Request, serving: ServingOf) -> None:
    """Refuse to change what is served."""
    raise InvalidRequest(f"{request.url.path} is not offered: this server serves {serving.model.id!r} as it is")


async def _capabilities(serving: Serving) -> list[str]:
    found = []
    if (template := serving.engine.chat_template) is not None:
        found += ["tools", "thinking"] if style_of(template).reasoning else ["tools"]
    try:
        await serving.engine.encode_infill("", "")
    except InvalidRequest:
        return found
    return [*found, "insert"]


def _model(serving: Serving, name: str) -> OllamaModel:
    digest = hashlib.sha256(serving.system_fingerprint.encode()).hexdigest()
    size = int(serving.engine.info.num_parameters * _weights(serving)[1] / 8)
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(serving)}


def _details(serving: Serving) -> OllamaDetails:
    info, file = serving.engine.info, serving.config.model
    family = re.sub(r"For[A-Z].*", "", info.architecture).lower()
    unit, size, digits = next((unit for unit in _UNITS if info.num_parameters >= unit[1]), _UNITS[-1])
    return {
        "parent_model": "",
        "format": "gguf" if BUNDLED.get(file, file).endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": f"{info.num_parameters / size:.{digits}f}{unit}",
        "quantization_level": _weights(serving)[0],
    }


def _weights(serving: Serving) -> tuple[str, float]:
    """The type of the weights, in a GGUF file that of the fewest bits, as names sort by bits; and the mean bits."""
    info = serving.engine.info
    plain = info.quantization == "none"
    level = _FLOATS.get(info.dtype, info.dtype) if plain else re.sub(r"gguf \((\w+).*", r"\1", info.quantization)
    bits = [int(found) for found in re.findall(r"Q(\d)", info.quantization)] or [_BITS.get(level, 16)]
    return level, sum(bits) / len(bits)
