"""GET /v1/models and /v1/models/{id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.protocol.common import ModelList
from server.serving import serving_of


async def list_models(request: Request) -> Response:
    return _json(ModelList(data=[serving_of(request).model]))


async def retrieve_model(request: Request) -> Response:
    serving = serving_of(request)
    serving.check_model(request.path_params["model_id"])
    return _json(serving.model)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
