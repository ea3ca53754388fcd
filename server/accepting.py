"""Connections are taken while there are file descriptors for them; the others wait in the kernel's queue."""

import asyncio
import errno
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

logger = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that the kernel keeps for us; Linux cuts it to net.core.somaxconn."""
RESERVE = 64
"""File descriptors for everything but clients: a restart of the engine, its files, its pipes."""
_AT_ONCE = 64
_PAUSE = 0.02
"""Seconds."""
_SILENCE = 5.0
"""Seconds without a request after which a connection has to go, where others wait."""
_MOST_DESCRIPTORS = 2**16


class Connection(Protocol):
    """Of uvicorn's connections, what is needed here."""

    transport: Any

    def shutdown(self) -> None:
        """Close when the answer under way has been sent, or at once."""


def raise_descriptor_limit() -> None:
    """To what this process may have."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """How many connections there are file descriptors for, of those that are open now and a reserve apart."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_open = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):
        return _MOST_DESCRIPTORS
    most = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    return max(8, most - num_open - RESERVE)


class Acceptor:
    """One listening socket. While the limit is reached nobody new is taken, and those that are here are asked to go:
    idle ones at once, busy ones behind their answer, silent ones after some seconds."""

    def __init__(
        self,
        listener: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        connections: Collection[Any],
        limit: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`connections` has those that are open, as `new_protocol` keeps it."""
        self._listener = listener
        self._new_protocol = new_protocol
        self._connections = connections
        self._limit = limit
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._silent: dict[Any, float] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._has_warned = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._connections) + len(self._opening) >= self._limit:
                self._wait(f"{self._limit} connections are open, as many as may be: others wait")
                return
            try:
                client, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                self._wait(f"cannot accept connections: {error.strerror}")
                return
            task = self._loop.create_task(self._open(client))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._new_protocol, client, ssl=self._tls)
        except (OSError, asyncio.CancelledError) as error:  # a client that has gone, or speaks no TLS
            client.close()
            logger.debug("a connection failed: %s", error)

    def _wait(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s (this is said once)", reason)
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_PAUSE, self._resume)
        self._ask_to_go()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _ask_to_go(self) -> None:
        now = time.monotonic()
        silent = {}
        for connection in list(self._connections):
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()
            else:
                silent[connection] = self._silent.get(connection, now)
                if now - silent[connection] > _SILENCE:
                    connection.transport.close()
        self._silent = silent
