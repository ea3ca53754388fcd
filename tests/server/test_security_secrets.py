"""What clients send, and the keys, appear in no log, no error, no metric and no route that tells of the server."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from configs.errors import RequestFailed, shown
from configs.settings import ServerConfig
from server.app import create_app
from tests.server.conftest import MODEL
from tests.server.described import ROUTES, Described
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES
from tests.server.test_live_server import LiveServer, live_server

SECRET = "SENTINEL of what nobody else should read"
KEY = "SENTINEL-key"
TEXT_FIELDS = ("prompt", "input", "text_1", "text_2", "query", "system", "suffix", "instructions")
WITH_BODY = [one for one in ROUTES if one.body_fields]
ABOUT_THE_SERVER = [one.path for one in ROUTES if one.method == "GET"]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(FakeEngine(), ServerConfig(api_key=(KEY,), max_body_bytes=100_000), MODEL)
    headers = {"authorization": f"Bearer {KEY}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        yield http


def secretive(path: str) -> dict[str, Any]:
    """A body that is accepted, with secrets in all its texts."""
    body = {**BODIES[path], "user": SECRET, "metadata": {"a": SECRET}, "cache_salt": SECRET}
    for field in TEXT_FIELDS:
        if field in body:
            body[field] = SECRET
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": SECRET}]
    if "documents" in body:
        body["documents"] = [SECRET]
    return body


def wrong_values() -> Iterator[Any]:
    yield from (SECRET, [SECRET], {"type": SECRET}, [{"type": SECRET, "role": SECRET}], SECRET * 3000)
    yield from ([{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}], [[SECRET]], {"a": {"b": SECRET}})
    yield from ([{"type": "function", "function": {"name": SECRET, "parameters": SECRET}}], [SECRET, 5], -5)


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda one: one.path)
async def test_errors_do_not_quote_what_was_sent(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, route: Described
) -> None:
    """Every field in turn holds what it should not."""
    caplog.set_level(logging.DEBUG)
    refused = 0
    for field in route.body_fields:
        for value in wrong_values():
            body = {**secretive(route.path), field: value}
            response = await client.post(route.path, json=body)
            if response.status_code >= 400:
                refused += 1
                assert "SENTINEL" not in response.text, body
                assert response.status_code < 500, response.text
            assert "SENTINEL" not in str(response.headers)
    assert refused > 20
    assert "SENTINEL" not in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "' + SECRET.encode(),
        SECRET.encode(),
        b'{"prompt": "' + SECRET.encode() + b'\xff"}',
        b'["' + SECRET.encode() + b'"]',
        json.dumps({"prompt": SECRET, "stop": [""], "n": 1}).encode(),
        json.dumps({"prompt": SECRET * 5000}).encode(),
        json.dumps({"prompt": SECRET, "model": SECRET}).encode(),
        json.dumps({"prompt": SECRET, "max_tokens": 10**6}).encode(),
    ],
)
async def test_neither_do_bodies_that_are_no_requests(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    for path in ("/v1/completions", "/v1/messages"):
        response = await client.post(path, content=content)
        assert 400 <= response.status_code < 500
        assert "SENTINEL" not in response.text + caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_nor_a_fault_of_ours(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    """Its traceback is logged, under the request's id."""
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine()
    engine.fail_after = (2, ZeroDivisionError("a fault"))
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(), MODEL))
    body = {**secretive("/v1/completions"), "stream": stream}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/v1/completions", json=body, headers={"x-request-id": "the-id"})
    assert "internal error" in response.text
    assert "a fault" not in response.text
    assert "request the-id failed" in caplog.text
    assert "ZeroDivisionError: a fault" in caplog.text
    assert SECRET not in caplog.text


async def test_nor_a_request_that_the_engine_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine()
    engine.fail_after = (2, RequestFailed("the logits are no numbers"))
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(), MODEL))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
            response = await client.post(path, json=secretive(path))
            assert (response.status_code, "SENTINEL" in response.text) == (500, False)
    assert "SENTINEL" not in caplog.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("json_schema", "'json_schema'"),
        ("model/name:v1.5", "'model/name:v1.5'"),
        ("", "''"),
        ("two words", "a text of 9 characters"),
        ("line\n", "a text of 5 characters"),
        ("x" * 65, "a text of 65 characters"),
        ("d\N{LATIN SMALL LETTER E WITH ACUTE}j", "a text of 3 characters"),
        (None, "None"),
        (True, "True"),
        (5, "5"),
        (1.5, "1.5"),
        (10**30, "a int"),
        ({"a": SECRET}, "an object"),
        ([SECRET], "a list"),
    ],
)
def test_errors_quote_names_and_numbers_alone(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("OCTAVO_API_KEY", KEY)
    (tmp_path / "keys").write_text(f"{KEY}-of-the-file\n")
    flags = ("--log-level", "debug", "--api-key-file", str(tmp_path / "keys"))
    with live_server(tmp_path / "log", *flags) as running:
        running.wait_ready()
        yield running


def test_a_real_server_tells_nobody(server: LiveServer, smollm2_path: Path) -> None:
    """Logs of both processes at the most talkative level, command lines, and every route about the server."""
    tool = {"type": "function", "function": {"name": "SENTINEL_tool", "parameters": {"type": "object"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": SECRET, "type": "string"}}}
    bodies: list[dict[str, Any]] = [
        {"stop": [SECRET], "cache_salt": SECRET, "user": SECRET},
        {"stream": True, "logprobs": True},
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": schema},
        {"messages": [{"role": SECRET}]},
        {"max_tokens": -1},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": f"({SECRET}"}}}},
    ]
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "bad_words": [SECRET]}
    told = ""
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}-of-the-file"}, timeout=60) as api:
        assert api.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        for headers in ({}, {"authorization": f"Bearer {KEY}x"}, {"x-request-id": SECRET}):
            told += httpx.get(f"{server.url}/v1/models", headers=headers).text
        statuses = [api.post("/v1/chat/completions", json={**chat, **body}).status_code for body in bodies]
        assert statuses == [200, 200, 200, 200, 400, 400, 400]
        for path in ABOUT_THE_SERVER:
            told += api.get(path.replace("{model_id:path}", "smollm2")).text
    told += server.log.read_text()
    assert f'curl -N {server.url}/v1/chat/completions -H "Authorization: Bearer $OCTAVO_API_KEY"' in told
    told += " ".join(
        " ".join(process.cmdline()) for process in (psutil.Process(server.process.pid), *server.children())
    )
    assert "SENTINEL" not in told
