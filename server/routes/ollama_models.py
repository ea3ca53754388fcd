"""What Ollama's API tells of the model: GET /api/tags, /api/ps and /api/version, POST /api/show.

And how it looks after models, of which there is the served one, as it is.
"""

import hashlib
import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import InvalidRequest
from configs.settings import ServerConfig
from engine.bundled import BUNDLED
from server.answers.styles import style_of
from server.parsing import BodyParser, ignored_header
from server.protocol.ollama import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    PullRequest,
    PullStatus,
    ShowRequest,
    ShowResponse,
)
from server.routes.ollama import LineStream
from server.serving import Serving, serving_of

API_VERSION = "0.13.0"
"""The version of Ollama whose API this is: clients decide by it what they may ask for."""
NEVER = "9999-12-31T23:59:59Z"
FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
BITS = {"F32": 32, "int8": 8, "int4": 4}
"""Of one parameter; 16 for those that are not here."""


async def list_tags(request: Request) -> Response:
    serving = serving_of(request)
    return _json(OllamaModels([_model(serving, name, modified_at=serving.model.created_at) for name in serving.models]))


async def list_running(request: Request) -> Response:
    serving = serving_of(request)
    size = _size(serving) if serving.engine.info.device.startswith("cuda") else 0
    limit = serving.model.max_model_len
    return _json(
        OllamaModels([_model(serving, serving.model.id, expires_at=NEVER, size_vram=size, context_length=limit)])
    )


async def api_version(request: Request) -> Response:
    return _json({"version": API_VERSION})


class ShowRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(ShowRequest, config)

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        parsed = await self.parser.parse(request)
        serving.check_model(parsed.body.model or parsed.body.name)
        return _json(await _shown(serving), ignored_header(parsed.ignored_fields))


class PullRoute:
    """Called with a request; raises `RequestError`. The served model is there, and no other can be had."""

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(PullRequest, config)

    async def __call__(self, request: Request) -> Response:
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving_of(request).check_model(body.model or body.name)
        content, headers = msgspec.json.encode(PullStatus()), ignored_header(parsed.ignored_fields)
        if body.stream is False:
            return Response(content, headers=headers, media_type="application/json")
        return Response(content + b"\n", headers=headers, media_type=LineStream.media_type)


async def refuse_changes(request: Request) -> Response:
    name = serving_of(request).model.id
    raise InvalidRequest(f"{request.url.path} is not offered: this server serves {name!r} as it is")


async def _shown(serving: Serving) -> ShowResponse:
    details = _details(serving)
    return ShowResponse(
        parameters="\n".join(f"{name} {value}" for name, value in serving.engine.default_sampling.items()),
        template=serving.engine.chat_template or "",
        details=details,
        model_info={
            "general.architecture": details.family,
            "general.parameter_count": serving.engine.info.num_parameters,
            f"{details.family}.context_length": serving.model.max_model_len,
        },
        capabilities=await _capabilities(serving),
        modified_at=serving.model.created_at,
    )


async def _capabilities(serving: Serving) -> list[str]:
    template = serving.engine.chat_template
    found = ["completion"]
    if template is not None:
        found.append("tools")
        if style_of(template).reasoning is not None:
            found.append("thinking")
    try:
        await serving.engine.encode_infill("", "")
    except InvalidRequest:
        return found
    return [*found, "insert"]


def _model(serving: Serving, name: str, **fields: str | int) -> OllamaModel:
    digest = hashlib.sha256(serving.system_fingerprint.encode()).hexdigest()
    given = {"name": name, "model": name, "size": _size(serving), "digest": digest, "details": _details(serving)}
    return msgspec.convert({**given, **fields}, OllamaModel)


def _details(serving: Serving) -> OllamaDetails:
    info = serving.engine.info
    family = re.sub(r"For[A-Z].*", "", info.architecture).lower()
    file = serving.config.model
    return OllamaDetails(
        format="gguf" if BUNDLED.get(file, file).endswith(".gguf") else "safetensors",
        family=family,
        families=[family],
        parameter_size=_parameter_size(info.num_parameters),
        quantization_level=_level(serving),
    )


def _level(serving: Serving) -> str:
    """The type of the weights: of a GGUF file's the one of the fewest bits, as names sort by bits."""
    info = serving.engine.info
    if info.quantization == "none":
        return FLOATS.get(info.dtype, info.dtype)
    stored = re.match(r"gguf \((\w+)", info.quantization)
    return stored[1] if stored else info.quantization


def _size(serving: Serving) -> int:
    """Bytes of the weights; those of a GGUF file by the mean of the bits of its types."""
    named = [int(bits) for bits in re.findall(r"Q(\d)", serving.engine.info.quantization)]
    bits = sum(named) / len(named) if named else BITS.get(_level(serving), 16)
    return int(serving.engine.info.num_parameters * bits / 8)


def _parameter_size(count: int) -> str:
    """As Ollama rounds."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if count >= size:
            return f"{count / size:.{digits}f}{unit}"
    return str(count)


def _json(content: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")
