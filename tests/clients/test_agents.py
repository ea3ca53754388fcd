"""The requests of coding agents, in reduced form, against a real model: Codex and Claude Code, two turns of each."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

PAYLOADS = sorted((Path(__file__).parent / "payloads").glob("*.json"))
END = {"/v1/responses": "response.incomplete", "/v1/messages?beta=true": "message_stop"}


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda path: path.stem)
def test_turns_of_an_agent_are_answered(url: str, payload: Path) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    agent: dict[str, Any] = json.loads(payload.read_text())
    for said in (agent["first"], agent["first"] + agent["later"]):
        asked = {**agent["body"], "model": "smollm2", "tools": agent["offered"], agent["conversation"]: said}
        asked[agent["limit"]] = 16
        events = client.post(
            agent["path"],
            cast_to=object,
            body=asked,
            stream=True,
            stream_cls=openai.Stream[object],
            options={"headers": agent["headers"]},
        )
        assert END[agent["path"]] in str(list(events)[-1])
