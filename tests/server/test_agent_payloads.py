"""The requests of coding agents, in reduced form: everything in them is served, or passed over by name."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine

PAYLOADS = sorted((Path(__file__).parents[1] / "clients" / "payloads").glob("*.json"))
TEMPLATE = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>"


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda path: path.stem)
async def test_turns_of_an_agent(client: httpx.AsyncClient, engine: FakeEngine, payload: Path) -> None:
    agent: dict[str, Any] = json.loads(payload.read_text())
    engine.chat_template = TEMPLATE
    name = agent["tools"][-1]
    engine.script = lambda prompt, params: f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    for is_later in (False, True):
        said = agent["first"] + agent["later"] * is_later
        asked = {**agent["body"], "model": "fake", "tools": agent["offered"], agent["conversation"]: said}
        asked[agent["limit"]] = 100
        response = await client.post(agent["path"], json=asked, headers=agent["headers"])
        assert response.status_code == 200, response.text
        ignored = response.headers.get("x-octavo-ignored-fields")
        expected = agent["ignored"] + agent["ignored_later"] * is_later
        assert sorted(ignored.split(", ") if ignored else []) == sorted(expected)
        assert [tool["function"]["name"] for tool in engine.template_kwargs["tools"]] == agent["tools"]
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line[:6] == "data: "]
        begun = [event.get("item") or event.get("content_block") or {} for event in events]
        assert name.rpartition("__")[2] in [one.get("name") for one in begun]
    called = [message for message in engine.messages if "tool_calls" in message]
    results = [message["content"] for message in engine.messages if message["role"] == "tool"]
    assert len(called) == len(results)
    assert results[-1] == "[image left out: this model reads only text]"
