"""The requests of coding agents, in reduced form: everything in them is served, or passed over by name."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.test_agent_histories import ITEMS, PRINTING, TemplateEngine

PAYLOADS = sorted((Path(__file__).parents[1] / "clients" / "payloads").glob("*.json"))
TEMPLATE = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>"


@pytest.fixture
def engine() -> FakeEngine:
    return TemplateEngine()


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


ODD: list[Any] = [None, 1.5, "", [], {}, [[]], {"type": "x"}, [{"type": "input_image"}], True, "{"]
INSISTING = PRINTING + "{# tool_call.id|length != 9, message.tool_calls|length == 1 #}"
CHAT = {
    "path": "/v1/chat/completions",
    "body": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}, {"type": "custom"}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                    {"id": "d", "type": "custom", "custom": {"name": "g", "input": "x"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{"}},
            {"role": "function", "name": "f", "content": "r"},
        ],
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield (*path, name)
        if name not in ("parameters", "input_schema"):
            yield from places(one, (*path, name))


@pytest.mark.parametrize("template", [ITEMS, INSISTING])
@pytest.mark.parametrize("name", ["codex", "claude_code", "chat"])
async def test_odd_values_anywhere_are_no_fault_of_the_server(
    client: httpx.AsyncClient, engine: TemplateEngine, name: str, template: str
) -> None:
    engine.chat_template = template
    agent: Any = CHAT if name == "chat" else json.loads(PAYLOADS[name == "codex"].read_text())
    body = {**agent["body"], "model": "fake", "stream": False}
    if name != "chat":
        body |= {"tools": agent["offered"], agent["conversation"]: agent["first"] + agent["later"], agent["limit"]: 9}
    assert (await client.post(agent["path"], json=body)).status_code == 200
    for count, (*path, last) in enumerate(places(body)):
        for odd in ODD if name == "chat" else ODD[count % 4 :: 4]:
            changed = copy.deepcopy(body)
            place = changed
            for step in path:
                place = place[step]
            place[last] = odd
            response = await client.post(agent["path"], json=changed)
            assert response.status_code in (200, 400, 404), (path, last, odd, response.text)
