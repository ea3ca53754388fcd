"""Answers that end when the client goes away; server-sent events, and the response that sends them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from configs.errors import RequestError

Result = TypeVar("Result")


class ClientGone(RequestError):
    """Nobody reads the answer; the status is only for logs."""

    status = 499


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; when the client disconnects first, cancel it, wait for its end and raise `ClientGone`.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    watching.add_done_callback(lambda _: working.cancel())
    try:
        return await working
    except asyncio.CancelledError:
        if watching.done() and not watching.cancelled():  # as all tasks are at the server's end
            raise ClientGone("the client closed the connection") from None
        raise
    finally:
        watching.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


SEND = "octavo.send"
"""Key in the scope: sends a piece of an answer that has begun, past the layers that look at its head and end."""
EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; `data` holds no line break."""
    return b"data: " + data + EVENT_END


def named_event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(data)


_ESCAPED = {character.encode(): b"\\u%04x" % ord(character) for character in "\x85\u2028\u2029"}


def without_odd_line_breaks(piece: bytes) -> bytes:
    """The same JSON, with those line breaks escaped that only Unicode knows: many clients split streams there too."""
    for character, escaped in _ESCAPED.items():
        piece = piece.replace(character, escaped)
    return piece


class EventWriter(Protocol):
    """Whole events for what comes; may be empty."""

    def events(self, item: Any) -> bytes: ...

    def end(self) -> bytes:
        """What follows the last item."""
        return b""

    def error(self, error: Exception) -> bytes:
        """Instead of `end`, for a stream that has begun."""
        raise error


class EventStream(Response):
    """Sends the events of each of `items` as it comes, in one piece.

    The response starts with the first piece, so that an error before it has a status of its own. A later one is the
    last event. Stops when the client goes away.
    """

    media_type = "text/event-stream"
    comment = b": keep-alive\n\n"
    """Sent after `keep_alive` to twice as many seconds without an event: no proxy takes the connection for dead."""

    def __init__(
        self,
        items: AsyncGenerator[Any, None],
        writer: EventWriter,
        headers: Mapping[str, str] | None = None,
        *,
        keep_alive: float = 0,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.items = items
        self.writer = writer
        self.keep_alive = keep_alive
        self.started = False
        self.num_sent = 0
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.send_piece = scope.get(SEND, send)
        with contextlib.suppress(ClientGone):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        commenting = asyncio.create_task(self._comment(send)) if self.keep_alive else None
        async with contextlib.aclosing(self.items):
            try:
                async for item in self.items:
                    if piece := self.writer.events(item):
                        await self._send(send, piece)
                last = self.writer.end()
            except Exception as error:
                if not self.started:
                    raise
                last = self.writer.error(error)
            finally:
                if commenting is not None:
                    commenting.cancel()
        await self._send(send, last, more=False)

    async def _send(self, send: Send, piece: bytes, *, more: bool = True) -> None:
        if not self.started:
            self.started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self.num_sent += 1
        body = piece if piece.isascii() else without_odd_line_breaks(piece)
        message = {"type": "http.response.body", "body": body, "more_body": more}
        await (self.send_piece if more else send)(message)

    async def _comment(self, send: Send) -> None:
        while True:
            num_sent = self.num_sent
            await asyncio.sleep(self.keep_alive)
            if self.num_sent == num_sent:
                await self._send(send, self.comment)
