"""GET /v1/engine/live."""

from starlette.requests import Request
from starlette.responses import Response

from server.errors import openai_error
from server.live.watch import Watch, one_frame
from server.metrics.records import current_owner
from server.serving import serving_of
from server.sse import EventStream, event

EVENTS = "text/event-stream"


class LiveRoute:
    """One frame for whoever asks; frames as they come for those who accept events."""

    def __init__(self) -> None:
        self.watch: Watch | None = None

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        if self.watch is None:
            self.watch = Watch(serving)
        if EVENTS not in request.headers.get("accept", ""):
            return Response(await one_frame(self.watch, current_owner()), media_type="application/json")
        if request.method == "HEAD":
            return Response(media_type=EVENTS)
        return EventStream(self.watch.frames(current_owner()), LiveWriter())


class LiveWriter:
    def events(self, frame: bytes) -> bytes:
        return event(frame)

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))
