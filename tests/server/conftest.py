"""Fixtures around `FakeEngine`: the application in-process, and behind a real port."""

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import uvicorn

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.fake_engine import FakeEngine

MODEL = "fake"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to the application in-process."""
    app = create_app(engine, ServerConfig(max_body_bytes=100_000), MODEL)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


@contextlib.contextmanager
def running_server(engine: FakeEngine, config: ServerConfig) -> Iterator[str]:
    """The application on a real port, in a thread; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(
        create_app(engine, config, MODEL), log_config=None, timeout_graceful_shutdown=1, lifespan="off"
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with running_server(engine, ServerConfig(max_body_bytes=100_000)) as address:
        yield address
