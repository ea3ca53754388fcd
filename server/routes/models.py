"""GET /v1/models and /v1/models/{id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.protocol.common import ModelList
from server.serving import serving_of


async def list_models(request: Request) -> Response:
    models = [*serving_of(request).models.values()]
    return _json(ModelList(data=models, first_id=models[0].id, last_id=models[-1].id))


async def retrieve_model(request: Request) -> Response:
    return _json(serving_of(request).check_model(request.path_params["model_id"]))


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
