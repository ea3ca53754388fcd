"""GET /health, /ping, /version, /load and /server_info."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.protocol.server_state import Health, Load, ServerInfo, Version
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


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
