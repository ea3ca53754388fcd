"""GET /metrics, /v1/requests/{request_id} and /v1/engine/live."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import RequestError, Unavailable, shown
from engine.messages import RequestSnapshot
from server.documented import EVENTS, streamed
from server.errors import ErrorResponse, openai_error
from server.metrics.live import Live
from server.metrics.prometheus import OPENMETRICS, TEXT
from server.metrics.records import current_owner
from server.metrics.timeline import RequestTimeline, timeline_of
from server.middleware import METHOD
from server.serving import Serving, ServingOf
from server.sse import EventStream, event

router = APIRouter()


class RequestNotFound(RequestError):
    status = 404
    type = "invalid_request_error"


@router.get("/metrics", response_class=Response, responses={200: {"content": {TEXT: {}, OPENMETRICS: {}}}})
async def metrics(request: Request, serving: ServingOf) -> Response:
    """Metrics for Prometheus."""
    content, media_type = serving.metrics.document(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": media_type, "cache-control": "no-store"})


@router.get("/v1/requests/{request_id:path}", response_model=RequestTimeline, responses={404: {"model": ErrorResponse}})
async def request_timeline(request_id: str, serving: ServingOf) -> Response:
    """What happened to a request, and why it took its time."""
    record = serving.requests.find(request_id, current_owner())
    if record is None:
        raise RequestNotFound(f"no request {shown(request_id)} runs or is among the latest (--max-kept-timelines)")
    snapshots: dict[str, RequestSnapshot] = {}
    if record.ended is None:
        with contextlib.suppress(Unavailable, TimeoutError):  # what the engine said before is better than nothing
            snapshots = {one.request_id: one for one in (await serving.live.snapshot()).requests}
    timeline = timeline_of(record, serving.model.id, snapshots, serving.requests.wait_causes)
    return Response(msgspec.json.encode(timeline), media_type="application/json")


@router.get("/v1/engine/live", response_model=Live, responses=streamed(Live) | {503: {"model": ErrorResponse}})
async def engine_live(request: Request, serving: ServingOf) -> Response:
    """What the engine does now; as it changes, for those who accept events."""
    serving.check_alive()
    if EVENTS not in request.headers.get("accept", ""):
        return Response(await serving.live.seen_by(current_owner()), media_type="application/json")
    if request.scope[METHOD] == "HEAD":
        return Response(media_type=EVENTS)
    return EventStream(live_events(serving, current_owner()), LiveWriter())


async def live_events(serving: Serving, owner: str) -> AsyncGenerator[bytes, None]:
    """What the owner may see, as JSON, until the server ends."""
    while serving.drained_by is None and not serving.engine.is_dead:
        yield await serving.live.seen_by(owner)
        await asyncio.sleep(serving.live.seconds_to_next())


class LiveWriter:
    def events(self, live: bytes) -> bytes:
        return event(live)

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))
