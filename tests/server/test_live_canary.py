"""What one request says is nowhere in another's answer: fifty at once, over every protocol, each with a secret."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.test_live_server import LiveServer, live_server

NUM_REQUESTS = 50
SECRET = re.compile(r"[A-Z]{2}\d{4}[A-Z]{2}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its cache is short, so that blocks change hands all the time."""
    with live_server(tmp_path_factory.mktemp("canary") / "log", "--kv-cache-tokens", "1536") as running:
        running.wait_ready()
        yield running


def secret(number: int) -> str:
    return f"{chr(65 + number % 26)}Q{number * 1733 % 10000:04}{chr(90 - number % 26)}X"


def chat(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"The code is {secret(number)}. Repeat the code: {secret(number)}."}]


def completion(number: int) -> tuple[str, dict[str, Any]]:
    text = f"The code is {secret(number)}. Again, the code is"
    return "/v1/completions", {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 16, "temperature": 0}


def openai_chat(number: int) -> tuple[str, dict[str, Any]]:
    fields = {"messages": chat(number), "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    return "/v1/chat/completions", {**fields, "temperature": 0.7, "seed": number}


def structured(number: int) -> tuple[str, dict[str, Any]]:
    pattern = {"regex": f"My code is ({secret(number)}|unknown)\\."}
    return "/v1/chat/completions", {"messages": chat(number), "structured_outputs": pattern, "temperature": 0}


def tool(number: int) -> tuple[str, dict[str, Any]]:
    parameters = {"type": "object", "properties": {"code": {"enum": [secret(number)]}}, "required": ["code"]}
    tools = [{"type": "function", "function": {"name": "report", "parameters": parameters}}]
    return "/v1/chat/completions", {
        "messages": chat(number), "tools": tools, "tool_choice": "required", "temperature": 0, "max_tokens": 48
    }  # fmt: skip


def response(number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": chat(number), "max_output_tokens": 24, "temperature": 0}


def message(number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"model": "smollm2", "messages": chat(number), "max_tokens": 24, "temperature": 0}


def ollama(number: int) -> tuple[str, dict[str, Any]]:
    options = {"temperature": 0, "num_predict": 24}
    return "/api/chat", {"model": "smollm2", "messages": chat(number), "stream": False, "options": options}


KINDS: list[Callable[[int], tuple[str, dict[str, Any]]]] = [
    completion, openai_chat, structured, tool, response, message, ollama
]  # fmt: skip


def said(answer: dict[str, Any]) -> Any:
    """What the model said, without ids, times and counts of what was cached."""
    if "choices" in answer:
        [choice] = answer["choices"]
        message = {**choice.get("message", {}), "tool_calls": None}
        calls = [call["function"] for call in choice.get("message", {}).get("tool_calls", [])]
        return choice.get("text"), message, calls, choice["logprobs"]
    if "output" in answer:
        return [item["content"] for item in answer["output"]]
    return answer.get("content") or answer["message"]["content"]


@pytest.mark.timeout(240)
async def test_no_secret_is_in_anothers_answer(server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=200) as client:

        async def ask(number: int) -> dict[str, Any]:
            path, body = KINDS[number % len(KINDS)](number)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        alone = [await ask(number) for number in range(NUM_REQUESTS)]
        together = await asyncio.gather(*map(ask, range(NUM_REQUESTS)))
    assert [said(answer) for answer in together] == [said(answer) for answer in alone]
    everybodys = {secret(number) for number in range(NUM_REQUESTS)}
    assert len(everybodys) == NUM_REQUESTS
    repeated = 0
    for number, answer in enumerate(together):
        found = everybodys & set(SECRET.findall(json.dumps(answer)))
        assert found <= {secret(number)}, (number, found)
        repeated += secret(number) in found
    assert repeated > NUM_REQUESTS // 3, "the answers must hold secrets for this to mean something"
