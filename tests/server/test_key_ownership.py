"""What a request with one API key makes, clients with another key neither see nor touch."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from configs.settings import ServerConfig
from engine.messages import RequestSnapshot, Snapshot
from scheduler.timeline import Timeline
from server.app import create_app
from tests.server.conftest import MODEL, running_server
from tests.server.fake_engine import FakeEngine, idle_look

ALICE, BOB = {"authorization": "Bearer alice"}, {"x-api-key": "bob"}
LIVE = "/v1/engine/live"


def app_of(engine: FakeEngine, *keys: str) -> httpx.AsyncClient:
    app = create_app(engine, ServerConfig(api_key=keys or None), MODEL)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=20)


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with app_of(engine, "alice", "bob") as http:
        yield http


async def stored(client: httpx.AsyncClient, who: dict[str, str], **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/responses", json={"input": "my PIN is 4711", **fields}, headers=who)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def running(client: httpx.AsyncClient, who: dict[str, str], **body: Any) -> asyncio.Task[httpx.Response]:
    task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi", **body}, headers=who))
    await asyncio.sleep(0.05)
    return task


@pytest.mark.parametrize("fields", [{}, {"background": True}, {"background": True, "stream": True}])
async def test_a_stored_response_is_there_for_its_own_key_alone(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    engine.delay = 0.01
    answer = await client.post("/v1/responses", json={"input": "my PIN is 4711", **fields}, headers=ALICE)
    [response_id] = {part.split('"')[0] for part in answer.text.split('"id":"')[1:] if part.startswith("resp_")}
    for method, path in [
        ("GET", ""),
        ("GET", "?stream=true"),
        ("GET", "/input_items"),
        ("POST", "/cancel"),
        ("DELETE", ""),
    ]:
        foreign = await client.request(method, f"/v1/responses/{response_id}{path}", headers=BOB)
        unknown = await client.request(method, f"/v1/responses/{response_id[::-1]}{path}", headers=BOB)
        assert (foreign.status_code, unknown.status_code) == (404, 404)
        assert foreign.text.replace(response_id, "") == unknown.text.replace(response_id[::-1], "")
        assert foreign.headers.keys() == unknown.headers.keys()
    assert (await client.get(f"/v1/responses/{response_id}", headers=ALICE)).status_code == 200
    assert (await client.delete(f"/v1/responses/{response_id}", headers=ALICE)).json()["deleted"] is True


async def test_neither_a_foreign_response_nor_its_items_can_be_continued(client: httpx.AsyncClient) -> None:
    response = await stored(client, ALICE)
    [item] = response["output"]
    for fields, status in [
        ({"previous_response_id": response["id"]}, 404),
        ({"input": [{"type": "item_reference", "id": item["id"]}]}, 400),
    ]:
        own = await client.post("/v1/responses", json={"input": "go on", **fields}, headers=ALICE)
        foreign = await client.post("/v1/responses", json={"input": "go on", **fields}, headers=BOB)
        assert (own.status_code, foreign.status_code) == (200, status)


async def test_asking_for_a_foreign_response_does_not_count_as_its_use(engine: FakeEngine) -> None:
    app = create_app(engine, ServerConfig(api_key=("alice", "bob"), max_stored_responses=2), MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        first, second = [(await stored(client, ALICE))["id"] for _ in range(2)]
        await client.get(f"/v1/responses/{first}", headers=BOB)
        await stored(client, ALICE)
        found = [(await client.get(f"/v1/responses/{one}", headers=ALICE)).status_code for one in (first, second)]
        assert found == [404, 200]


async def test_a_timeline_is_told_to_its_own_key_alone(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay = 0.05
    mine = {**ALICE, "x-request-id": "mine"}
    while_it_runs = await running(client, mine)
    for _ in range(2):
        for who, status in [(ALICE, 200), (BOB, 404)]:
            assert (await client.get("/v1/requests/mine", headers=who)).status_code == status
        answer = (await while_it_runs).json()
    assert (await client.get(f"/v1/requests/{answer['id']}", headers=BOB)).status_code == 404
    await client.post("/v1/completions", json={"prompt": "bob's"}, headers={**BOB, "x-request-id": "mine"})
    of_each = [(await client.get("/v1/requests/mine", headers=who)).json()["response_id"] for who in (ALICE, BOB)]
    assert of_each[0] == answer["id"] != of_each[1]


def looked(engine: FakeEngine) -> Snapshot:
    """All requests that run, as the core would tell of them."""
    ids = [request_id for request_id, *_ in engine.requests]
    return Snapshot(
        idle_look().stats, [RequestSnapshot(one, True, 2, 3, 2, [1], Timeline(queued=0.0)) for one in ids], bytes(8)
    )


async def names(client: httpx.AsyncClient, who: dict[str, str]) -> list[str]:
    return names_in((await client.get(LIVE, headers=who)).text)


def names_in(frame: str) -> list[str]:
    return [one["id"] for one in json.loads(frame)["engine"]["requests"]]


async def test_live_views_hide_the_ids_of_others_in_the_same_way_in_each_frame(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.delay, engine.look = 0.3, lambda: looked(engine)
    tasks = [await running(client, ALICE), await running(client, BOB, request_id="bobs")]
    of_alice = [await names(client, ALICE) for _ in range(2)]
    of_bob = await names(client, BOB)
    assert of_alice[0] == of_alice[1]
    true_ids = [request_id for request_id, *_ in engine.requests]
    assert (of_alice[0][0], of_bob[1]) == tuple(true_ids)
    for hidden in (of_alice[0][1], of_bob[0]):
        assert hidden.startswith("other-")
        assert "bobs" not in hidden
        assert hidden not in true_ids
    await asyncio.gather(*tasks)


def test_streams_of_frames_hide_them_too(engine: FakeEngine) -> None:
    engine.look = lambda: looked(engine)
    with running_server(engine, ServerConfig(api_key=("alice", "bob"))) as url, httpx.Client(base_url=url) as client:
        engine.delay, engine.script = 0.1, lambda prompt, params: "x" * 100
        body = {"max_tokens": 100, "prompt": "hi", "stream": True, "request_id": "bobs"}
        seen = []
        with client.stream("POST", "/v1/completions", json=body, headers=BOB) as bobs:
            pieces = bobs.iter_lines()
            assert next(pieces)
            for who in (ALICE, BOB):
                with client.stream("GET", LIVE, headers={**who, "accept": "text/event-stream"}) as frames:
                    lines = (line for line in frames.iter_lines() if line)
                    seen.append([names_in(next(lines).removeprefix("data: ")) for _ in range(2)])
    assert all(first == second for first, second in seen)
    assert ("bobs" in str(seen[0]), "bobs" in str(seen[1])) == (False, True)


async def test_without_keys_everybody_sees_all(engine: FakeEngine) -> None:
    engine.delay, engine.look = 0.2, lambda: looked(engine)
    async with app_of(engine) as client:
        task = await running(client, {})
        assert await names(client, {}) == [engine.requests[0][0]]
        response = await stored(client, {})
        assert (await client.get(f"/v1/responses/{response['id']}", headers=BOB)).status_code == 200
        await task


PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ("/v1/embeddings", {"input": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize(("first", "first_body"), PATHS)
async def test_an_id_that_a_request_of_the_same_key_has_is_refused_and_others_may_have_it(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    first: str,
    first_body: dict[str, Any],
) -> None:
    engine.delay = 0.1
    fields = {"request_id": "same", "max_tokens": 3}
    sent = asyncio.create_task(client.post(first, json={**first_body, **fields}, headers=ALICE))
    while not engine.requests:
        await asyncio.sleep(0.005)
    again = await client.post(path, json={**body, **fields}, headers=ALICE)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
    of_other = await client.post(path, json={**body, **fields}, headers=BOB)
    assert of_other.status_code == (await sent).status_code == 200
    answer = of_other.json()
    assert (answer.get("id") or answer["request_id"]).endswith("same")
    in_engine = [request_id for request_id, *_ in engine.requests]
    assert len(in_engine) == len(set(in_engine)) == 2
    assert (await client.post(path, json={**body, **fields}, headers=ALICE)).status_code == 200


async def test_keys_share_no_cached_prefix_unless_they_name_the_same_salt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    of_each = []
    for who in (ALICE, BOB, {"x-api-key": "alice"}):
        engine.requests.clear()
        for path, body in [*PATHS, ("/v1/embeddings", {"input": "hi"})]:
            assert (await client.post(path, json=body, headers=who)).status_code == 200
        [salt] = {engine.embedded[4], *(request[4] for request in engine.requests)}
        of_each.append(salt)
    assert of_each[0] == of_each[2] != of_each[1]
    assert not any(salt is None or "alice" in salt or "bob" in salt for salt in of_each)
    engine.requests.clear()
    for who in (ALICE, BOB):
        await client.post("/v1/completions", json={"prompt": "hi", "cache_salt": "shared"}, headers=who)
    assert [request[4] for request in engine.requests] == ["shared", "shared"]
