"""Large bodies are prepared off the event loop, in turn, and bounded; small ones wait for none of them."""

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from configs.settings import ServerConfig
from server import bodies
from server.openai.completions import CompletionRequest
from tests.server.conftest import running_server
from tests.server.fake_engine import FakeEngine

LARGE = "x" * 40_000
PATHS = {
    "/v1/completions": {"prompt": LARGE},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LARGE}]},
    "/v1/responses": {"input": LARGE},
    "/v1/responses/input_tokens": {"input": LARGE},
    "/v1/messages": {"messages": [{"role": "user", "content": LARGE}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LARGE}]},
    "/inference/v1/generate": {"token_ids": [1] * 20_000, "sampling_params": {}},
    "/api/chat": {"messages": [{"role": "user", "content": LARGE}], "stream": False},
    "/api/generate": {"prompt": LARGE, "stream": False},
    "/api/embed": {"input": LARGE},
    "/api/embeddings": {"prompt": LARGE},
    "/completion": {"prompt": LARGE},
    "/infill": {"input_prefix": LARGE, "input_suffix": "b"},
    "/v1/embeddings": {"input": LARGE},
    "/score": {"text_1": "a", "text_2": LARGE},
    "/rerank": {"query": "a", "documents": [LARGE]},
    "/tokenize": {"prompt": LARGE},
    "/detokenize": {"tokens": [1] * 20_000},
    "/apply-template": {"messages": [{"role": "user", "content": LARGE}]},
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lambda prompt, params: "ok", max_model_len=100_000)


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_of_a_large_body_is_done_on_the_event_loop(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the parser, converters and the template take, others do not wait for."""
    validate = bodies.validate

    def slow_validation(*args: Any) -> None:
        time.sleep(1)

    monkeypatch.setattr(bodies, "validate", lambda data, body_type: time.sleep(1) or validate(data, body_type))
    monkeypatch.setattr(engine, "validate", slow_validation)
    answer = asyncio.create_task(client.post(path, json=PATHS[path]))
    last, longest = time.perf_counter(), 0.0
    while not answer.done():
        await asyncio.sleep(0.005)
        now = time.perf_counter()
        last, longest = now, max(longest, now - last)
    assert (await answer).status_code == 200, (await answer).text
    assert longest < 0.8


async def test_small_requests_wait_for_no_large_ones(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, ended = engine.render_chat, asyncio.Event()

    async def slow_render(messages: Any, *args: Any, **kwargs: Any) -> Any:
        if len(messages[0]["content"]) > 1000:
            while not ended.is_set():
                await asyncio.sleep(0.01)
        return await render(messages, *args, **kwargs)

    monkeypatch.setattr(engine, "render_chat", slow_render)
    path, body = "/v1/chat/completions", PATHS["/v1/chat/completions"]
    large = [asyncio.create_task(client.post(path, json=body)) for _ in range(6)]
    await asyncio.sleep(0.2)
    small = await client.post(path, json={"messages": [{"role": "user", "content": "hi"}]}, timeout=5)
    assert small.status_code == 200
    assert not any(task.done() for task in large)
    ended.set()
    assert {answer.status_code for answer in await asyncio.gather(*large)} == {200}


async def test_a_thread_that_cannot_be_had_fails_one_request(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path, body = "/tokenize", PATHS["/tokenize"]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(5):
            assert (await client.post(path, json=body)).status_code == 500
    assert (await client.post(path, json=body, timeout=5)).status_code == 200


def unfinished(url: str, body: bytes) -> socket.socket:
    """A connection that has sent a large body but for its last byte."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:-1])
    return connection


def test_unfinished_bodies_are_bounded_altogether(engine: FakeEngine) -> None:
    body = json.dumps({"prompt": "x" * 90_000}).encode()
    with running_server(engine, ServerConfig(max_body_bytes=100_000)) as url:
        connections = [unfinished(url, body) for _ in range(4)]
        deadline = time.monotonic() + 10
        while (refused := httpx.post(f"{url}/v1/completions", content=body)).status_code == 200:
            assert time.monotonic() < deadline
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "small"}).status_code == 200
        connections[0].sendall(body[-1:])
        assert connections[0].recv(12) == b"HTTP/1.1 200"
        for connection in connections:
            connection.close()
        while httpx.post(f"{url}/v1/completions", content=body).status_code != 200:
            assert time.monotonic() < deadline


async def test_who_leaves_is_not_prepared(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what waits for its turn, nor what is under way and awaits something."""
    begun, cancelled = [], []

    async def encode(text: str, **kwargs: Any) -> list[int]:
        begun.append(text[0])
        try:
            await asyncio.sleep(0.5 if text[0] == "d" else 60)
        except asyncio.CancelledError:
            cancelled.append(text[0])
            raise
        return [1]

    monkeypatch.setattr(engine, "encode", encode)
    with running_server(engine, ServerConfig()) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            posts = []
            for letter in "abc":
                posts.append(asyncio.create_task(http.post("/v1/completions", json={"prompt": letter * 40_000})))
                await asyncio.sleep(0.2)
            last = asyncio.create_task(http.post("/v1/completions", json={"prompt": "d" * 40_000}, timeout=20))
            await asyncio.sleep(0.2)
            for post in reversed(posts):
                post.cancel()
                await asyncio.sleep(0.1)
            assert (await last).status_code == 200
    assert begun == ["a", "b", "d"]
    assert sorted(cancelled) == ["a", "b"]


@pytest.mark.parametrize("letter", ["[", "{", ",", ":", '\\"', "\\\\", '\\\\\\"'])
def test_what_stands_in_texts_does_not_count(letter: str) -> None:
    """A text of a million brackets is one value."""
    data = b'{"prompt": "' + letter.encode() * 1_100_000 + b'", "user": "[]"}'
    assert bodies.validate(data, CompletionRequest).prompt == json.loads(f'"{letter}"') * 1_100_000


@pytest.mark.parametrize("values", ['"{}": 1', '"x": [{}, []]', "1"])
async def test_values_are_bounded(values: str) -> None:
    with running_server(FakeEngine(), ServerConfig()) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            many = ", ".join([values.replace("{}", str(index)) for index in range(1_100_000)])
            many = f"[{many}]" if values == "1" else f"{{{many}}}"
            answer = await http.post("/v1/completions", content=f'{{"prompt": "x", "unknown": {many}}}', timeout=30)
    assert answer.status_code == 400
    assert "1000000 values" in answer.json()["error"]["message"]
