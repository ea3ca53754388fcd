"""Items of the Responses API as messages of a chat."""

from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.test_responses_route import TEMPLATE

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}
TOLD = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
RESULT = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "2"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **fields}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [user("hi")]),
        ([{"role": "developer", "content": "d"}, user("u")], [{"role": "developer", "content": "d"}, user("u")]),
        ([user("a"), user("b"), model("c"), model("d")], [user("a"), user("b"), model("c"), model("d")]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [user("a\nb")],
        ),
        (
            [
                {"role": "assistant", "content": [{"type": "output_text", "text": "a", "logprobs": None}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ],
            [model("a"), model("no")],
        ),
        ([CALL, OUTPUT], [model("", tool_calls=[TOLD]), RESULT]),
        ([model("so"), CALL, CALL, OUTPUT], [model("so", tool_calls=[TOLD, TOLD]), RESULT]),
        ([CALL, model("so")], [model("", tool_calls=[TOLD]), model("so")]),
        ([CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "2"}]}], [model("", tool_calls=[TOLD]), RESULT]),
        (
            [user("a"), {**CALL, "arguments": ""}],
            [user("a"), model("", tool_calls=[{**TOLD, "function": {"name": "f", "arguments": {}}}])],
        ),
        (
            [thought("t"), model("a"), thought("s"), CALL],
            [model("a", reasoning_content="t"), model("", reasoning_content="s", tool_calls=[TOLD])],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, model("a")],
            [model("a", reasoning_content="s")],
        ),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, model("a")], [model("a")]),
        ([user("a"), thought("led to nothing")], [user("a")]),
    ],
)
async def test_items_become_messages(
    client: httpx.AsyncClient, engine: FakeEngine, items: Any, messages: list[dict[str, Any]]
) -> None:
    engine.chat_template = TEMPLATE
    response = await client.post("/v1/responses", json={"input": items})
    assert response.status_code == 200, response.text
    assert engine.messages == messages


async def test_items_get_ids_and_keep_theirs(client: httpx.AsyncClient) -> None:
    given = [user("a"), {**user("b"), "id": "msg_b", "type": "message"}]
    response = await client.post("/v1/responses", json={"input": given})
    page = await client.get(f"/v1/responses/{response.json()['id']}/input_items?order=asc")
    first, second = page.json()["data"]
    assert first["id"].startswith("msg_")
    assert (second["id"], second["status"]) == ("msg_b", "completed")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "computer_call"}, "input[0]: type 'computer_call' is not supported"),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "input[0].content[0]: type must be one of 'input_text', 'output_text', 'refusal'; got 'input_audio'",
        ),
        (
            {**OUTPUT, "output": [{"type": "input_smell"}]},
            "input[0].output[0]: parts of type 'input_smell' are not supported; only text",
        ),
        (
            {"role": "user", "content": 1},
            "input[0].content: input should be a valid string or input should be a valid array",
        ),
        ({"role": "user"}, "input[0].content: field required"),
        ({}, "input[0].id: field required"),
        (OUTPUT, "no function call before the output of 'c'"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, item: Any, message: str) -> None:
    response = await client.post("/v1/responses", json={"input": [item]})
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["message"], response.json()["error"]["param"]) == (message, "input")
