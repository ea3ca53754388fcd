"""GET /metrics and GET /v1/requests/{request_id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import RequestError, shown
from server.metrics.records import current_owner
from server.serving import serving_of


class RequestNotFound(RequestError):
    status = 404
    type = "invalid_request_error"


async def metrics(request: Request) -> Response:
    content, media_type = await serving_of(request).telemetry.metrics(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": media_type, "cache-control": "no-store"})


async def request_timeline(request: Request) -> Response:
    telemetry = serving_of(request).telemetry
    request_id = request.path_params["request_id"]
    record = telemetry.ledger.find(request_id, current_owner())
    if record is None:
        raise RequestNotFound(f"no request {shown(request_id)} runs or is among the latest (--max-kept-timelines)")
    return Response(msgspec.json.encode(await telemetry.timeline(record)), media_type="application/json")
