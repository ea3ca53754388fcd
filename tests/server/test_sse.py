"""Streams beyond their events: comments that keep connections alive, usage that the server forces."""

import json
import sys
import time
from typing import Any

import httpx
import pytest

from configs.errors import RequestFailed
from configs.settings import ServerConfig
from server.app import create_app
from tests.server.fake_engine import FakeEngine


async def text_of(engine: FakeEngine, config: ServerConfig, max_tokens: int = 3) -> str:
    app = create_app(engine, config, "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/v1/completions", json={"prompt": "ab", "stream": True, "max_tokens": max_tokens})
    return response.text


async def test_a_silent_stream_sends_comments() -> None:
    engine = FakeEngine()
    engine.delay = 0.1
    pieces = (await text_of(engine, ServerConfig(sse_keep_alive_interval=0.03))).split("\n\n")
    assert pieces[0] == ": keep-alive"
    assert [piece for piece in pieces if piece != ": keep-alive"][-2:] == ["data: [DONE]", ""]
    assert sum(piece.startswith("data: ") for piece in pieces) == 5
    assert pieces.count(": keep-alive") >= 6


async def test_a_busy_stream_sends_none() -> None:
    """It takes longer than the interval, but none of its silences does."""
    engine = FakeEngine(lambda prompt, params: "x" * 30)
    engine.delay = 0.05
    begin = time.monotonic()
    text = await text_of(engine, ServerConfig(sse_keep_alive_interval=1), max_tokens=30)
    assert time.monotonic() - begin > 1.2
    assert ": keep-alive" not in text


async def test_an_error_behind_a_comment_is_an_event() -> None:
    engine = FakeEngine()
    engine.delay, engine.fail_after = 0.1, (0, RequestFailed("not a number"))
    text = await text_of(engine, ServerConfig(sse_keep_alive_interval=0.03))
    assert "not a number" in text.split("\n\n")[-2]


ODD = "a\u2028b\u2029c\x85d\u2019\x0b\x0c\x1c\x1d\x1ee\\\u2028"
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 100},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100},
    "/v1/responses": {"input": "x"},
    "/api/chat": {"messages": [{"role": "user", "content": "x"}]},
    "/api/generate": {"prompt": "x"},
}


@pytest.mark.parametrize("path", STREAMS)
async def test_lines_of_a_stream_are_lines_for_everybody(path: str) -> None:
    """Clients that split as str.splitlines does, httpx.iter_lines among them, find whole JSON."""
    engine = FakeEngine(lambda prompt, params: ODD)
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(), "fake"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(path, json={**STREAMS[path], "stream": True})
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines()]
    objects = [json.loads(line) for line in lines if line and not line.startswith("event: ") and line != "[DONE]"]
    assert len(objects) > len(ODD)
    for character in ODD:
        assert json.dumps(character)[1:-1] in json.dumps(objects)


async def test_usage_can_be_forced() -> None:
    assert '"usage":{"prompt_tokens":3' in await text_of(FakeEngine(), ServerConfig(enable_force_include_usage=True))


async def test_text_can_come_in_intervals() -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerConfig(stream_interval=4), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for fields in ({"stream": True}, {"stream": True, "stream_interval": 7}, {}, {"stop": "x"}):
            assert (await client.post("/v1/completions", json={"prompt": "ab", **fields})).status_code == 200
        refused = await client.post("/v1/completions", json={"prompt": "ab", "stream_interval": 0})
    assert engine.intervals == [4, 7, sys.maxsize, 1]
    assert refused.json()["error"]["param"] == "stream_interval"


def test_streams_show_that_they_live_before_proxies_and_clients_give_up() -> None:
    """Proxies do after 60 s, and Node's `fetch` after 300 s without a header; a prompt may take longer."""
    assert 0 < ServerConfig().sse_keep_alive_interval <= 30
