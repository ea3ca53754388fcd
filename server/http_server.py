"""uvicorn around the application: bounds on what clients may keep open, unfinished or unread, and an end that nothing
can hold up."""

import asyncio
import contextlib
import logging
import math
import re
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from server.app import create_app
from server.bodies import OVERDUE
from server.listener import connection_limit
from server.serving import Serving

logger = logging.getLogger(__name__)

LAST_WORDS = 1
"""Seconds for what is told to those whose requests do not get finished."""
BYTES_PER_SECOND = 16 * 2**10
"""Of a body, so many earn it another second to arrive in."""
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
        self.complete_scope = self.scope
        """Of the last request that has come whole; the current one has another."""
        self.head = b""
        """The beginning of a request's head, which uvicorn gets when it is whole."""
        self.num_unused = 0
        """Bytes that came since the parser last made something of them: the part of a header, say."""
        self.due = 0.0
        """When what is awaited of the client has to be here, by the event loop's clock."""
        self.timer: asyncio.TimerHandle | None = None
        """While something is awaited. Requests that come in one piece have none."""
        self.acknowledged: int | None = None
        """See `_bytes_acknowledged`; so it was at the moment `progressed` of the monotonic clock."""
        self.progressed = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it can be closed without harm: nothing is asked, and every answer has been sent."""
        return not (self.unanswered or self.transport.is_closing() or self.transport.get_write_buffer_size())

    # What the event loop calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        self.pool.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.pool.open.pop(self, None)
        super().connection_lost(exc)
        for cycle in self.unanswered:  # uvicorn tells the last one alone
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self.num_unused += len(data)
        super().data_received(self._take_head(data) if self.scope is self.complete_scope else data)
        if self.num_unused > self.pool.config.max_header_bytes and not self.transport.is_closing():
            if not self.unanswered:
                self.transport.write(_HEADER_TOO_LARGE)
            self.transport.close()
        self._set_timer()

    # What the parser and a request's cycle call

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.headers = []  # trailers are none of the scope's: whoever checked the headers on the way has not seen them
        self.unanswered.append(self.cycle)
        self.num_unused = 0
        self.due = self.loop.time() + self.pool.config.request_read_timeout

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self.num_unused = 0
        if self.unanswered:  # else it is the rest of what was refused
            self.due += len(body) / BYTES_PER_SECOND

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.complete_scope = self.scope
        self.num_unused = 0

    def on_response_complete(self) -> None:
        self.unanswered.popleft()
        super().on_response_complete()
        self._stop_timer()
        self._set_timer()

    def _take_head(self, data: bytes) -> bytes:
        """What the parser may have of `data`, with which a request begins: nothing until its head is whole.

        Offers of other protocols, such as h2c of Java's client, are left out: the parser would stop behind the head.
        """
        data = self.head + data
        end = data.find(_HEAD_END)
        if end < 0 and data[:1].isalpha() and b"\n\n" not in data:  # else it is no HTTP, which the parser says at once
            self.head = data
            return b""
        self.head = b""
        if b"upgrade:" in data[:end].lower():
            return _UPGRADE.sub(b"", data[:end]) + data[end:]
        return data

    def _set_timer(self) -> None:
        """Running while the rest of a body, or of a head, is awaited: not while an answer is."""
        if self.unanswered:
            is_awaiting = self.unanswered[0].more_body
        else:
            is_awaiting = self.num_unused > 0 or self.scope is not self.complete_scope
        if not is_awaiting:
            self._stop_timer()
        elif self.timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self.due = self.loop.time() + self.pool.config.request_read_timeout
        self.timer = self.loop.call_at(self.due, self._on_timer)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _on_timer(self) -> None:
        if self.loop.time() < self.due:
            self.timer = self.loop.call_at(self.due, self._on_timer)
        elif self.unanswered and not (cycle := self.unanswered[0]).response_started:  # whoever reads the body says it
            self.timer = None
            cycle.scope["state"][OVERDUE] = True
            cycle.more_body = False
            cycle.message_event.set()
        else:
            self.transport.close()


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
        while True:
            await asyncio.sleep(timeout / _CHECKS_PER_TIMEOUT)
            now = time.monotonic()
            for one in list(self.open):
                if (acknowledged := _bytes_acknowledged(one.transport)) != one.acknowledged:
                    one.acknowledged, one.progressed = acknowledged, now
                elif acknowledged is not None and now - one.progressed >= timeout:
                    one.transport.abort()


def _bytes_acknowledged(transport: asyncio.Transport) -> int | None:
    """How many of all bytes sent the client has acknowledged; None where nothing waits for it, or on Unix sockets."""
    try:
        client = transport.get_extra_info("socket")
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        num_unacknowledged, acknowledged, num_unsent = _TCP_INFO.unpack(info)
    except (OSError, ValueError, struct.error):  # another family; closed meanwhile; an old kernel
        return None
    return acknowledged if num_unacknowledged or num_unsent or transport.get_write_buffer_size() else None


class Server(uvicorn.Server):
    """uvicorn, whose own handlers of signals are not installed."""

    def __init__(self, config: uvicorn.Config, serving: Serving, connections: ConnectionPool) -> None:
        super().__init__(config)
        self.serving = serving
        self.connections = connections
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self.connections.close_stalled())
        try:
            await super().serve(sockets)
        finally:
            closing.cancel()

    def stop_on_signals(self) -> None:
        """SIGINT and SIGTERM end the server; the process then leaves with code 0."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """Once: take no more work, let what runs finish, and end. Twice: end."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self.force_exit = True
            self.end()

    def end(self) -> None:
        """Let requests that have ended tell so, and end."""
        self.config.timeout_graceful_shutdown = LAST_WORDS
        self.should_exit = True

    async def _drain(self) -> None:
        serving = self.serving
        serving.drained_by = time.monotonic() + serving.config.shutdown_timeout
        while serving.num_running and time.monotonic() < serving.drained_by:
            await asyncio.sleep(0.02)
        if serving.num_running:
            serving.engine.end_all(serving.shutting_down())
            self.end()
        else:  # slow readers may go on with what is on its way
            self.config.timeout_graceful_shutdown = max(LAST_WORDS, math.ceil(serving.drained_by - time.monotonic()))
            self.should_exit = True


def make_server(engine: AsyncEngine, config: ServerConfig, model_name: str) -> Server:
    app = create_app(engine, config, model_name)
    connections = ConnectionPool(config, min(connection_limit(), config.max_connections or 2**63))
    settings = uvicorn.Config(
        app,
        http=connections.protocol(),
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.timeout_keep_alive,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
    )
    return Server(settings, app.state.serving, connections)
