"""HTTP/1.1 for clients that misbehave: what they read, when, and how they end the connection is up to them."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

NO_LINGER = struct.pack("ii", 1, 0)
SMALL_BUFFER = 4096
"""Bytes that the kernel and we keep for a client which reads slowly, so that the server notices."""


class ConnectionLost(Exception):
    """The connection ended before the answer did. `in_answer` when a part of it had come."""

    def __init__(self, message: str, *, in_answer: bool) -> None:
        super().__init__(message)
        self.in_answer = in_answer


@dataclass(frozen=True)
class Head:
    status: int
    headers: dict[str, str]


class Connection:
    """One answer at a time. Raises `ConnectionLost`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._can_stay = True

    @classmethod
    async def open(cls, port: int, *, small: bool = False) -> "Connection":
        """`small`: buffers that fill up soon."""
        client = socket.socket()
        client.setblocking(False)
        if small:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
            return cls(*await asyncio.open_connection(sock=client, limit=SMALL_BUFFER if small else 2**20))
        except BaseException:
            client.close()
            raise

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        self.writer.write(request(method, path, body, headers))

    async def head(self) -> Head:
        with self._losing(in_answer=False):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines[1:-2])
        head = Head(int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in fields})
        self._can_stay = head.headers.get("connection") != "close"
        return head

    async def pieces(self, head: Head) -> AsyncIterator[bytes]:
        """The body, as the server has cut it."""
        with self._losing(in_answer=True):
            if head.headers.get("transfer-encoding") != "chunked":
                yield await self.reader.readexactly(int(head.headers["content-length"]))
                return
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)

    async def body(self, head: Head) -> bytes:
        return b"".join([piece async for piece in self.pieces(head)])

    @property
    def can_stay(self) -> bool:
        """Whether the answer is over and another one may follow."""
        return self._can_stay and not self.reader.at_eof() and not self.writer.is_closing()

    def close(self, *, abruptly: bool = False) -> None:
        """`abruptly`: with a reset, as a process that is killed does."""
        if abruptly:
            with contextlib.suppress(OSError):
                self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            self.writer.transport.abort()
        self.writer.close()

    @contextlib.contextmanager
    def _losing(self, *, in_answer: bool) -> Iterator[None]:
        try:
            yield
        except asyncio.IncompleteReadError as error:
            raise ConnectionLost("the connection was closed", in_answer=in_answer or bool(error.partial)) from error
        except (OSError, ValueError, asyncio.LimitOverrunError) as error:
            raise ConnectionLost(repr(error), in_answer=in_answer) from error


def request(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """Its bytes; `body` is sent as JSON."""
    content = b"" if body is None else json.dumps(body).encode()
    fields = {
        "Host": "chaos",
        "Content-Type": "application/json",
        **(headers or {}),
        "Content-Length": str(len(content)),
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + content


async def get(port: int, path: str, *, seconds: float) -> tuple[int, bytes]:
    """Status and body, on a connection of its own. Raises `TimeoutError`, `OSError`, `ConnectionLost`."""
    async with asyncio.timeout(seconds):
        connection = await Connection.open(port)
        try:
            connection.send("GET", path)
            head = await connection.head()
            return head.status, await connection.body(head)
        finally:
            connection.close()
