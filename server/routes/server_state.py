"""GET /health, /ping, /version, /load, /server_info and /tokenizer_info."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.protocol.server_state import Health, Load, ServerInfo, TokenizerInfo, Version
from server.serving import serving_of
from server.version import version


async def health(request: Request) -> Response:
    """200 while requests can be answered; 503 once the engine is gone."""
    serving_of(request).check_alive()
    return _json(Health())


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


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
