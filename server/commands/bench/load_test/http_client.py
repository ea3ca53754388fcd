"""HTTP/1.1 for a load test: keep-alive connections whose pieces are timed when they are read.

A general client costs tens of microseconds for each piece of a stream. Here llhttp parses, and the receiver is called
from within the socket's callback with the one time at which the bytes were read.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

Receive = Callable[[bytes, float], None]
"""Gets the bytes of a body and the time they were read, by `time.perf_counter`."""


class ConnectionLost(Exception):
    """The connection ended before the response did. `before_response` when nothing of it had come."""

    def __init__(self, message: str, *, before_response: bool) -> None:
        super().__init__(message)
        self.before_response = before_response


class Address(NamedTuple):
    host: str
    port: int
    is_tls: bool
    path: str
    """Without a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Raises `ValueError` for what is not http://HOST or https://HOST."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"not a URL like http://localhost:8000: {url!r}")
        if parts.username is not None:  # it would be printed and saved
            raise ValueError("a URL must not hold a name or password: give a --header")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HttpClient:
    """One server. As many connections as requests are under way; idle ones are used again."""

    def __init__(
        self, address: Address, headers: Mapping[str, str], *, timeout: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """`timeout`: seconds that a whole response may take."""
        self.address = address
        self.timeout = timeout
        self._tls = (tls or ssl.create_default_context()) if address.is_tls else None
        lines = {"Host": address.host_header, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def request(self, method: str, path: str, body: bytes, receive: Receive) -> tuple[int, bytes]:
        """The status, and the body of a status other than 200; that of 200 goes to `receive` piece by piece.

        Raises `OSError`, `ConnectionLost`, or `TimeoutError`.
        """
        first = f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        message = first.encode("latin-1") + body
        async with asyncio.timeout(self.timeout):
            while True:
                connection, is_fresh = await self._connect()
                try:
                    return await self._exchange(connection, message, receive)
                except ConnectionLost as error:
                    if is_fresh or not error.before_response:
                        raise
                    # an idle connection that the server closed just before: not an answer to this request

    async def _exchange(self, connection: "_Connection", message: bytes, receive: Receive) -> tuple[int, bytes]:
        try:
            answer = await connection.send(message, receive)
        except BaseException:
            connection.close()
            raise
        if connection.is_usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connect(self) -> tuple["_Connection", bool]:
        """A connection, and whether it is new."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection, False
        loop, address = asyncio.get_running_loop(), self.address
        host = address.host if self._tls else None
        _, connection = await loop.create_connection(
            lambda: _Connection(self._open), address.host, address.port, ssl=self._tls, server_hostname=host
        )
        return connection, True

    def close(self) -> None:
        for connection in list(self._open):
            connection.close()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """One response at a time. The methods named on_… are llhttp's callbacks."""

    def __init__(self, opened: set["_Connection"]) -> None:
        self.is_usable = True
        self._opened = opened
        self._transport: asyncio.WriteTransport | None = None
        self._ended: asyncio.Future[tuple[int, bytes]] | None = None

    async def send(self, message: bytes, receive: Receive) -> tuple[int, bytes]:
        assert self._transport is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._refusal = b""
        self._length_is_known = False
        self._transport.write(message)
        return await self._ended

    def close(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._opened.add(self)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._ended is None or self._ended.done():
            self.close()  # bytes that belong to no request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(ConnectionLost(f"not HTTP: {error}", before_response=False))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_usable = False
        self._opened.discard(self)
        if self._ended is None or self._ended.done():
            return
        if self._status and not self._length_is_known and error is None:
            self._ended.set_result((self._status, self._refusal))  # a body that ends with its connection
        else:
            text = str(error) if error else "the server closed the connection before the end of its answer"
            self._fail(ConnectionLost(text, before_response=not self._status))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._length_is_known = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self._status == 200:
            self._receive(piece, self._now)
        else:
            self._refusal += piece

    def on_message_complete(self) -> None:
        if self._status >= 200 and self._ended is not None and not self._ended.done():
            self.is_usable = self.is_usable and self._parser.should_keep_alive()
            self._ended.set_result((self._status, self._refusal))

    def _fail(self, error: BaseException) -> None:
        self.is_usable = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
