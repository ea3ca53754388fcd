"""Health, deadlines, refusals and drain as clients see them, in-process."""

import asyncio
import contextlib
import json
import time
from typing import Any

import httpx
import openai
import pytest

from configs.errors import EngineDead, ShuttingDown
from configs.settings import ServerConfig
from engine.supervisor import Status
from server.app import create_app
from server.http_server import make_server
from server.serving import Serving
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES

GENERATING = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate", "/v1/responses"]
GENERATING += ["/api/chat", "/api/generate"]
EMBEDDING = ["/v1/embeddings", "/pooling", "/score", "/rerank", "/api/embed", "/api/embeddings"]


@pytest.fixture
def slow(engine: FakeEngine) -> FakeEngine:
    """Gives a token every 10 ms, and more of them than anybody waits for."""
    engine.script = lambda prompt, params: "a" * 900
    engine.delay = 0.01
    return engine


@pytest.mark.parametrize(
    ("status", "ready", "live"),
    [("ok", 200, 200), ("restarting", 503, 200), ("frozen", 503, 503), ("stuck", 503, 503), ("dead", 503, 503)],
)
async def test_health(client: httpx.AsyncClient, engine: FakeEngine, status: Status, ready: int, live: int) -> None:
    engine.status = status
    engine.is_dead = status == "dead"
    for path, expected in (("/health", ready), ("/health/ready", ready), ("/ping", ready), ("/health/live", live)):
        answer = await client.get(path)
        assert answer.status_code == expected, path
        assert (answer.json()["status"], answer.json()["num_steps"]) == (status, 7)
        assert answer.json().get("reason", "") == ("" if status == "ok" else f"it is {status}")
        assert (await client.head(path)).status_code == expected


def of_time(seconds: float, path: str, **fields: Any) -> dict[str, Any]:
    body = {**BODIES[path], "timeout_s": seconds, **fields}
    if path == "/inference/v1/generate":
        return body | {"sampling_params": {"max_tokens": 800}}
    if path == "/api/chat" or path == "/api/generate":
        return body | {"stream": fields.get("stream", False)}
    return body | {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 800}


REASONS: dict[str, Any] = {
    "/v1/completions": lambda answer: answer["choices"][0]["finish_reason"],
    "/v1/chat/completions": lambda answer: answer["choices"][0]["finish_reason"],
    "/inference/v1/generate": lambda answer: answer["choices"][0]["finish_reason"],
    "/v1/messages": lambda answer: answer["stop_reason"],
    "/v1/responses": lambda answer: (answer["status"], answer["incomplete_details"]["reason"]),
    "/api/chat": lambda answer: answer["done_reason"],
    "/api/generate": lambda answer: answer["done_reason"],
}
EXPECTED = dict.fromkeys(REASONS, "timeout") | {
    "/v1/messages": "max_tokens",
    "/v1/responses": ("incomplete", "timeout"),
}


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("asked", [True, False])
async def test_an_answer_that_takes_too_long_ends_as_it_is(slow: FakeEngine, path: str, asked: bool) -> None:
    """As the request asks, or by the server's own bound."""
    app = create_app(slow, ServerConfig(request_timeout=100 if asked else 0.1), MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        start = time.monotonic()
        answer = await client.post(path, json=of_time(0.1 if asked else 50, path))
        assert 0.1 <= time.monotonic() - start < 2
    assert answer.status_code == 200, answer.text
    assert REASONS[path](answer.json()) == EXPECTED[path]
    assert "aaa" in answer.text or "97,97" in answer.text


async def test_a_stream_ends_with_the_reason(url: str, slow: FakeEngine) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.completions.create(
            model=MODEL, prompt="x", max_tokens=800, stream=True, extra_body={"timeout_s": 0.1}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith("aaa")
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "timeout"


@pytest.mark.parametrize("path", GENERATING + EMBEDDING)
async def test_times_that_make_no_sense_are_refused(client: httpx.AsyncClient, path: str) -> None:
    for value in (0, -1, 1e300, "soon", [1]):
        answer = await client.post(path, json={**BODIES[path], "timeout_s": value})
        assert answer.status_code == 400
        if not path.startswith("/api"):
            assert answer.json()["error"]["param"] == "timeout_s"


@pytest.mark.parametrize("path", EMBEDDING)
async def test_embeddings_have_the_deadline_too(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    await client.post(path, json={**BODIES[path], "timeout_s": 5})
    [deadline] = engine.deadlines
    assert deadline is not None
    assert 0 < deadline - time.monotonic() <= 5


async def test_without_a_bound_there_is_no_deadline(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json=BODIES["/v1/completions"])
    assert engine.deadlines == [None]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_told_before_anything_begins(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, stream: bool
) -> None:
    engine.is_full = True
    answer = await client.post(path, json={**BODIES[path], "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "9")
    if not path.startswith("/api"):
        assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_a_full_queue_takes_no_background_response(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_full = True
    answer = await client.post("/v1/responses", json={"input": "x", "background": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "9")


async def test_a_background_response_that_was_taken_is_not_refused_later(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others fill the queue before its work begins."""
    check = engine.check_room

    def fill_up(num_requests: int, num_tokens: int, priority: int = 0) -> None:
        check(num_requests, num_tokens, priority)
        engine.is_full = True

    monkeypatch.setattr(engine, "check_room", fill_up)
    taken = (await client.post("/v1/responses", json={"input": "x", "background": True})).json()
    place = f"/v1/responses/{taken['id']}"
    while (response := (await client.get(place)).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    assert (response["status"], response["error"]) == ("completed", None)


async def test_anthropics_clients_are_told_of_overload(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.end = ShuttingDown(retry_after=3)
    answer = await client.post("/v1/messages", json=BODIES["/v1/messages"])
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert (answer.headers["retry-after"], answer.headers["connection"]) == ("3", "close")


async def test_a_lost_engine_tells_when_the_next_one_may_come(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.end = EngineDead("gone", retry_after=4)
    answer = await client.post("/v1/completions", json=BODIES["/v1/completions"])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "4")


def serving_of(client: httpx.AsyncClient) -> Serving:
    transport = client._transport
    assert isinstance(transport, httpx.ASGITransport)
    serving: Serving = transport.app.state.serving  # type: ignore[attr-defined]
    return serving


async def test_a_draining_server_takes_no_work_but_tells_of_what_it_has(
    client: httpx.AsyncClient, slow: FakeEngine
) -> None:
    running = (await client.post("/v1/responses", json={"input": "x", "background": True})).json()
    serving = serving_of(client)
    assert (await client.get("/load")).json() == {"server_load": 1}, "what runs in the background has to be finished"
    serving.drained_by = time.monotonic() + 12
    for path in BODIES:
        answer = await client.post(path, json=BODIES[path])
        assert (answer.status_code, answer.headers["connection"]) == (503, "close"), path
        assert 11 <= int(answer.headers["retry-after"]) <= 12
    assert (await client.get("/health")).json()["status"] == "draining"
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/health/live")).status_code == 200
    assert (await client.get(f"/v1/responses/{running['id']}")).json()["status"] in ("queued", "in_progress")
    await client.post(f"/v1/responses/{running['id']}/cancel")
    assert serving.num_running == 0


@contextlib.asynccontextmanager
async def server_in_this_loop(engine: FakeEngine, **settings: Any):  # type: ignore[no-untyped-def]
    from server.listener import bind

    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = make_server(engine, ServerConfig(**settings), MODEL)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield server, client
            server.stop()
            server.stop()
            await asyncio.wait_for(serving, 5)


STREAM = {"prompt": "x", "max_tokens": 800, "stream": True}


async def test_the_time_to_shut_down_is_kept(slow: FakeEngine) -> None:
    """Streams that are not through by then end with an error; so does an answer that was not begun."""
    async with server_in_this_loop(slow, shutdown_timeout=0.3) as (server, client):
        whole = asyncio.create_task(client.post("/v1/completions", json={**STREAM, "stream": False}))
        async with client.stream("POST", "/v1/completions", json=STREAM) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            start = time.monotonic()
            server.stop()
            rest = [line async for line in lines if line]
        assert 0.3 <= time.monotonic() - start < 2
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert (await whole).status_code == 503


async def test_what_ends_in_time_is_finished(slow: FakeEngine) -> None:
    async with server_in_this_loop(slow, shutdown_timeout=20) as (server, client):
        async with client.stream("POST", "/v1/completions", json=STREAM | {"max_tokens": 30}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            server.stop()
            refused = await client.post("/v1/completions", json=STREAM)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        for _ in range(100):
            await asyncio.sleep(0.02)
            if server.should_exit:
                break
        assert server.should_exit
        assert slow.end is None


async def test_a_server_without_work_ends_at_once(engine: FakeEngine) -> None:
    async with server_in_this_loop(engine, shutdown_timeout=20) as (server, client):
        assert (await client.get("/health")).status_code == 200
        server.stop()
        start = time.monotonic()
        while server.serving is None or not server.should_exit:
            await asyncio.sleep(0.01)
        assert time.monotonic() - start < 1
