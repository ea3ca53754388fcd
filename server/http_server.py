"""uvicorn around the application, with an end that nothing can hold up."""

import asyncio
import contextlib
import functools
import math
import signal
import socket
import sys
import time
from collections.abc import Generator
from typing import Any

import uvicorn

from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from server.accepting import Acceptor, connection_limit
from server.app import create_app
from server.security.connection import connection_class
from server.security.tls import server_context
from server.serving import Serving
from server.stalled_clients import end_stalled_clients

LAST_WORDS = 1
"""Seconds for what is told to those whose requests do not get finished."""


class Server(uvicorn.Server):
    """uvicorn with our own way of accepting connections, and without handlers of signals: see `stop_on_signals`."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self.serving = serving
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """`lifespan` is off."""
        config = self.config
        protocol: Any = config.http_protocol_class
        new_protocol = functools.partial(protocol, config=config, server_state=self.server_state, app_state={})
        limit = min(connection_limit(), self.serving.config.max_connections or sys.maxsize)
        self.acceptors = [
            Acceptor(listener, new_protocol, self.server_state.connections, limit, config.ssl)
            for listener in sockets or []
        ]
        self.servers = self.acceptors  # type: ignore[assignment]
        if timeout := self.serving.config.client_timeout:
            self._stalled_clients = asyncio.create_task(end_stalled_clients(self.server_state.connections, timeout))
        self.started = True

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
    protocol: Any = connection_class(config)
    settings = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.timeout_keep_alive,
    )
    settings.load()
    settings.ssl = server_context(config)
    return Server(settings, app.state.serving)


def stop_on_signals(server: Server) -> None:
    """SIGINT and SIGTERM end the server; the process then leaves with code 0."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
