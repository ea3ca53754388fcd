"""uvicorn's connections, with bounds on what clients may keep open, unfinished or unread."""

import asyncio
import logging
import re
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from configs.settings import ServerConfig

logger = logging.getLogger(__name__)

_HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_HEADER_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_CHECKS_PER_TIMEOUT = 4
_TCP_INFO = struct.Struct("=24xI92xQ16xI")
"""Of Linux's struct tcp_info: unacked, bytes_acked, notsent_bytes."""


class Connection(HttpToolsProtocol):
    """Ends where no request arrives within --request-read-timeout. Keep-alive and flow control are uvicorn's."""

    pool: "ConnectionPool"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unanswered: deque[RequestResponseCycle] = deque()
        """Requests whose heads have come; the first is with the application."""
        self.is_between_requests = True
        self.is_in_head = False
        self.head = b""
        """The beginning of a request's head, which uvicorn gets when it is whole."""
        self.num_unused = 0
        """Bytes that came since the parser last made something of them: the part of a header, say."""
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it can be closed without harm: nothing is asked, and every answer has been sent."""
        return not (self.unanswered or self.transport.is_closing() or self.transport.get_write_buffer_size())

    # What the event loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()
        self.pool.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        self.pool.open.pop(self, None)
        super().connection_lost(exc)
        for cycle in self.unanswered:  # uvicorn tells the last one alone
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if not self.unanswered and self.deadline is None:
            self._set_deadline()
        self.num_unused += len(data)
        if self.is_between_requests:
            data = self._take_head(data)
        super().data_received(data)
        if self.num_unused > self.pool.config.max_header_bytes and not self.transport.is_closing():
            if not self.unanswered:
                self.transport.write(_HEADER_TOO_LARGE)
            self.transport.close()

    # What the parser and a request's cycle call

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.is_between_requests, self.is_in_head = False, True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:  # not a trailer, which whoever checked the headers on the way has not seen
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.unanswered.append(self.cycle)
        self._clear_deadline()
        self.is_in_head = False
        self.num_unused = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self.num_unused = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.is_between_requests = True
        self.num_unused = 0

    def on_response_complete(self) -> None:
        self.unanswered.popleft()
        super().on_response_complete()

    def _take_head(self, data: bytes) -> bytes:
        """What the parser may have of `data`, with which a request begins: nothing until its head is whole.

        Offers of other protocols, such as h2c of Java's client, are left out: the parser would stop behind the head.
        """
        data = self.head + data
        end = data.find(_HEAD_END)
        if end < 0 and data[:1].isalpha():  # else it is no HTTP, which the parser says at once
            self.head = data
            return b""
        self.head = b""
        if b"upgrade:" in data[:end].lower():
            return _UPGRADE.sub(b"", data[:end]) + data[end:]
        return data

    def _set_deadline(self) -> None:
        self.deadline = self.loop.call_later(self.pool.config.request_read_timeout, self.transport.close)

    def _clear_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class ConnectionPool:
    """The open connections of one server."""

    def __init__(self, config: ServerConfig, limit: int) -> None:
        """`limit` is how many there may be."""
        self.config = config
        self.limit = limit
        self.open: dict[Connection, None] = {}
        """In the order in which they came."""
        self._has_warned = False

    def protocol(self) -> type[asyncio.Protocol]:
        """The class that uvicorn makes a connection of."""
        return type("Connection", (Connection,), {"pool": self})

    def add(self, connection: Connection) -> None:
        """Where there are too many, close the oldest idle one: the new one itself if all others have requests."""
        self.open[connection] = None
        if len(self.open) > self.limit:
            next((one for one in self.open if one.is_idle), connection).transport.close()
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%d connections are open, as many as may be: idle ones are closed", self.limit)

    async def close_stalled(self) -> None:
        """Until cancelled, end connections whose clients take nothing of what they were sent for --client-timeout.

        The kernel's own bound for that, TCP_USER_TIMEOUT, also ends clients that read all the time, if slowly and with
        a small window: its probes of the window count on although some of what waits is taken.
        """
        timeout = self.config.client_timeout
        if not timeout or sys.platform != "linux":
            return
        progress: dict[Connection, tuple[int, float]] = {}  # bytes acknowledged, and since when no more
        while True:
            await asyncio.sleep(timeout / _CHECKS_PER_TIMEOUT)
            now, before, progress = time.monotonic(), progress, {}
            for connection in list(self.open):
                acknowledged = _bytes_acknowledged(connection.transport)
                if acknowledged is None:
                    continue
                num_bytes, since = before.get(connection, (acknowledged, now))
                if acknowledged == num_bytes and now - since >= timeout:
                    connection.transport.abort()
                else:
                    progress[connection] = (acknowledged, since if acknowledged == num_bytes else now)


def _bytes_acknowledged(transport: asyncio.Transport) -> int | None:
    """How many of all bytes sent the client has acknowledged; None where nothing waits for it, or on Unix sockets."""
    try:
        client = transport.get_extra_info("socket")
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        num_unacknowledged, acknowledged, num_unsent = _TCP_INFO.unpack(info)
    except (OSError, ValueError, struct.error):  # another family; closed meanwhile; an old kernel
        return None
    return acknowledged if num_unacknowledged or num_unsent or transport.get_write_buffer_size() else None
