"""GET /health and its kin, /version, /load, /server_info and /tokenizer_info."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.protocol.server_state import Health, Load, ServerInfo, TokenizerInfo, Version
from server.serving import Serving, serving_of
from server.version import version


async def ready(request: Request) -> Response:
    """200 while a completion would be answered; 503 otherwise, with the reason."""
    health = health_of(serving_of(request))
    return _json(health, 200 if health.status == "ok" else 503)


async def live(request: Request) -> Response:
    """503 when only another server process would help: a restart of the engine is under way, or none was of use."""
    health = health_of(serving_of(request))
    return _json(health, 503 if health.status in ("frozen", "stuck", "dead") else 200)


def health_of(serving: Serving) -> Health:
    engine = serving.engine.health()
    is_draining = serving.drained_by is not None
    return Health(
        status="draining" if is_draining else engine.status,
        reason="the server finishes what runs, and then ends" if is_draining else engine.reason,
        beat_age=round(engine.beat_age, 3),
        step_age=round(engine.step_age, 3),
        num_steps=engine.num_steps,
    )


async def show_version(request: Request) -> Response:
    return _json(Version(version()))


async def load(request: Request) -> Response:
    return _json(Load(serving_of(request).num_running))


async def server_info(request: Request) -> Response:
    serving = serving_of(request)
    info = serving.engine.info
    known = {name: getattr(info, name) for name in ServerInfo.__struct_fields__ if hasattr(info, name)}
    return _json(ServerInfo(version=version(), model=serving.model.id, **known))


async def tokenizer_info(request: Request) -> Response:
    engine = serving_of(request).engine
    tokens = engine.tokenizer.special_tokens
    return _json(
        TokenizerInfo(
            vocab_size=engine.info.vocab_size,
            model_max_length=engine.info.max_model_len,
            chat_template=engine.chat_template,
            bos_token=tokens.get("bos_token"),
            eos_token=tokens.get("eos_token"),
            pad_token=tokens.get("pad_token"),
            unk_token=tokens.get("unk_token"),
        )
    )


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
