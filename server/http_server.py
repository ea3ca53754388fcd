"""uvicorn around the application, with an end that nothing can hold up."""

import asyncio
import contextlib
import math
import signal
import socket
import time
from collections.abc import Generator

import uvicorn

from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from server.app import create_app
from server.connections import ConnectionPool
from server.listener import connection_limit
from server.request_limits import RequestLimits
from server.serving import Serving

LAST_WORDS = 1
"""Seconds for what is told to those whose requests do not get finished."""


class Server(uvicorn.Server):
    """uvicorn without handlers of signals: see `stop_on_signals`."""

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
        RequestLimits(app, config),
        http=connections.protocol(),
        ws="none",
        lifespan="off",
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


def stop_on_signals(server: Server) -> None:
    """SIGINT and SIGTERM end the server; the process then leaves with code 0."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
