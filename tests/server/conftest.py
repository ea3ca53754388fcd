"""Fixtures around `FakeEngine`: the application in-process, and behind a real port."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from configs.settings import ServerConfig
from server.app import create_app
from server.http_server import make_server
from server.listener import bind
from tests.server.fake_engine import FakeEngine

MODEL = "fake"


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Commands configure logging; their handlers would write to a test's captured output after its end."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)


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
def running_server(engine: FakeEngine, config: ServerConfig, model: str = MODEL) -> Iterator[str]:
    """The server on a real port, in a thread; gives its URL."""
    listener = bind("127.0.0.1", 0)
    server = make_server(engine, config, model)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end()
        thread.join()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with running_server(engine, ServerConfig(max_body_bytes=100_000)) as address:
        yield address
