"""uvicorn around the application, with an end that nothing can hold up."""

import asyncio
import contextlib
import signal
from collections.abc import Generator

import uvicorn

from configs.settings import ServerConfig
from server.app import create_app
from server.serving import EngineFace

GRACE_SECONDS = 5
"""After the first signal, requests may run this long; a second signal ends them at once."""


class Server(uvicorn.Server):
    """uvicorn without handlers of its own: see `stop_on_signals`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        """Once: refuse new requests and let those that run finish. Twice: end."""
        self.force_exit = self.should_exit
        self.should_exit = True


def make_server(engine: EngineFace, config: ServerConfig, model_name: str) -> Server:
    return Server(
        uvicorn.Config(
            create_app(engine, config, model_name),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


def stop_on_signals(server: Server) -> None:
    """SIGINT and SIGTERM end the server; the process then leaves with code 0."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
