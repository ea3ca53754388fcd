"""What `ResponseStore` keeps, and for how long."""

import asyncio
from typing import Any

import httpx
import pytest

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def client_of(engine: FakeEngine, **fields: Any) -> httpx.AsyncClient:
    app = create_app(engine, ServerConfig(**fields), "fake")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def made(client: httpx.AsyncClient, text: str = "hi", **fields: Any) -> str:
    response = await client.post("/v1/responses", json={"input": text, **fields})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def kept(client: httpx.AsyncClient, *response_ids: str) -> list[bool]:
    """Asking counts as use."""
    return [(await client.get(f"/v1/responses/{one}")).status_code == 200 for one in response_ids]


async def test_what_was_not_used_for_longest_goes(engine: FakeEngine) -> None:
    async with client_of(engine, max_stored_responses=2) as client:
        first = await made(client)
        second = await made(client)
        assert await kept(client, first) == [True]
        third = await made(client)
        assert await kept(client, first, second, third) == [True, False, True]


async def test_continuing_a_response_is_use(engine: FakeEngine) -> None:
    async with client_of(engine, max_stored_responses=2) as client:
        first = await made(client)
        second = await made(client)
        third = await made(client, previous_response_id=first)
        assert await kept(client, first, second, third) == [True, False, True]


async def test_bytes_are_bounded(engine: FakeEngine) -> None:
    async with client_of(engine, max_stored_response_bytes=4000) as client:
        small = [await made(client) for _ in range(3)]
        assert all(await kept(client, *small))
        large = await made(client, "x" * 900, max_output_tokens=1)
        assert await kept(client, large) == [True]
        assert not all(await kept(client, *small))
        longer = await made(client, "", previous_response_id=large, max_output_tokens=1)
        assert await kept(client, large, longer) == [False, True]
    async with client_of(engine, max_stored_response_bytes=100) as client:
        assert await kept(client, await made(client)) == [False]


async def test_what_runs_stays(engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "x" * (20 if prompt == "slow" else 1)
    engine.delay = 0.01
    async with client_of(engine, max_stored_responses=0) as client:
        running = await made(client, "slow", background=True)
        done = await made(client)
        assert await kept(client, running, done) == [True, False]
        while (await kept(client, running)) == [True]:
            await asyncio.sleep(0.01)


async def test_a_fault_of_the_servers_fails_a_background_response(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("server.chat.Answers.delta", broken)
    async with client_of(engine) as client:
        response_id = await made(client, background=True)
        while (found := (await client.get(f"/v1/responses/{response_id}")).json())["status"] == "queued":
            await asyncio.sleep(0.01)
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        streamed = await client.post("/v1/responses", json={"input": "hi", "background": True, "stream": True})
        assert streamed.text.count("event: response.failed") == 1


async def test_a_background_response_that_never_began_can_be_cancelled(engine: FakeEngine) -> None:
    async with client_of(engine) as client:
        response_id = await made(client, background=True)
        cancelled = await client.post(f"/v1/responses/{response_id}/cancel")
        assert (cancelled.json()["status"], cancelled.json()["output"]) == ("cancelled", [])
        assert await kept(client, response_id) == [True]


async def test_ids_cannot_be_guessed_or_listed(engine: FakeEngine) -> None:
    async with client_of(engine) as client:
        ids = {await made(client) for _ in range(3)}
        assert all(len(one) == len("resp_") + 32 for one in ids)
        assert (await client.get("/v1/responses")).status_code == 405
        for path in ("", "/input_items"):
            answer = await client.get(f"/v1/responses/resp_0{path}")
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")


async def test_an_empty_continuation(engine: FakeEngine) -> None:
    async with client_of(engine) as client:
        first = await made(client, "a")
        await made(client, previous_response_id=first, input=[])
        assert [message["content"] for message in engine.messages] == ["a", "<a>"]
