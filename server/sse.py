"""Server-sent events: framing, and the response that sends them."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.disconnect import ClientGone, until_disconnect

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; `data` holds no line break."""
    return b"data: " + data + b"\n\n"


class EventWriter(Protocol):
    """Whole events for what comes; may be empty."""

    def events(self, item: Any) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: Exception) -> bytes:
        """Instead of `end`, for a stream that has begun."""
        ...


class EventStream(Response):
    """Sends the events of each of `items` as it comes, in one piece.

    The response starts with the first piece, so that an error before it has a status of its own. A later one is the
    last event. Stops when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(
        self, items: AsyncGenerator[Any, None], writer: EventWriter, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self.items = items
        self.writer = writer
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        started = False
        async with contextlib.aclosing(self.items):
            try:
                async for item in self.items:
                    if piece := self.writer.events(item):
                        if not started:
                            await self._start(send)
                            started = True
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = self.writer.end()
            except Exception as error:
                if not started:
                    raise
                last = self.writer.error(error)
        if not started:
            await self._start(send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
