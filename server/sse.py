"""Server-sent events: framing, and the response that sends them."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.disconnect import ClientGone, until_disconnect

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; `data` holds no line break."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends `pieces`, each of one or more whole events, as they come.

    The response starts with the first piece, so that an error before it has a status of its own. A later one
    is sent as the event that `error_data` makes of it, and ends the stream. Stops when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        error_data: Callable[[Exception], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.pieces = pieces
        self.error_data = error_data
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self.pieces):
            piece = await anext(self.pieces)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            try:
                async for piece in self.pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception as error:
                body = event(self.error_data(error))
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
