"""/v1/chat/completions in-process."""

import json
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post(PATH, json={"messages": HELLO, **fields})


async def answer(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await post(client, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def refused(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await post(client, **fields)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await post(client, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
    lines = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_shape_of_a_whole_answer(client: httpx.AsyncClient) -> None:
    whole = await answer(client)
    assert whole["id"].startswith("chatcmpl-")
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "<hi>", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert whole["usage"]["total_tokens"] == 7


async def test_an_empty_answer_is_an_empty_string(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: ""
    assert (await answer(client))["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("n", [1, 3])
async def test_role_once_then_content_then_one_finish_chunk(
    client: httpx.AsyncClient, engine: FakeEngine, n: int
) -> None:
    engine.script = lambda prompt, params: "x" * (3 if params.seed is None else params.seed)
    chunks = await stream(client, n=n, seed=2, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    for index in range(n):
        choices = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1] == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert all(choice["finish_reason"] is None for choice in choices[:-1])
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"]["content"] for choice in choices[:-1]) == "x" * (2 + index)


async def test_logprobs(client: httpx.AsyncClient) -> None:
    top = [
        {"token": "<", "logprob": -0.5, "bytes": [60]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [128]},
    ]
    content = [{"token": "<", "logprob": -0.5, "bytes": [60], "top_logprobs": top}]
    whole = await answer(client, logprobs=True, top_logprobs=2, max_tokens=1)
    assert whole["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    chunks = await stream(client, logprobs=True, top_logprobs=2, max_tokens=1)
    assert chunks[1]["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    without_top = await answer(client, logprobs=True, max_tokens=1)
    assert without_top["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
async def test_without_max_tokens_the_context_is_the_limit(
    client: httpx.AsyncClient, engine: FakeEngine, fields: Any
) -> None:
    engine.script = lambda prompt, params: "x" * 2000
    whole = await answer(client, **fields)
    assert whole["usage"]["total_tokens"] == 1000
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_the_newer_limit_wins(client: httpx.AsyncClient) -> None:
    assert (await answer(client, max_tokens=1, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


async def test_text_parts_equal_a_string(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("user", "system", "assistant"):
        await answer(client, messages=[{"role": role, "content": parts}])
        assert engine.messages == [{"role": role, "content": "a\nb"}]


async def test_history_with_tool_calls(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = "{% for tool in tools %}{% endfor %}<tool_call>"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    await answer(client, messages=messages)
    assert engine.messages[1]["content"] == ""
    assert engine.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "x",
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": 5, "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "forbidden", "content": ""}],
    ],
)
async def test_bad_messages_are_refused(client: httpx.AsyncClient, messages: Any) -> None:
    assert (await refused(client, messages=messages))["param"] == "messages"


async def test_the_refused_part_is_named(client: httpx.AsyncClient) -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    error = await refused(client, messages=[*HELLO, {"role": "user", "content": [part]}])
    assert "messages[1].content[0]" in error["message"]
    assert "image_url" in error["message"]


@pytest.mark.parametrize(
    ("fields", "opened", "continued"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
async def test_template_arguments(
    client: httpx.AsyncClient, engine: FakeEngine, fields: Any, opened: bool, continued: bool
) -> None:
    await answer(client, **fields, chat_template_kwargs={"enable_thinking": False})
    assert engine.template_kwargs == {
        "enable_thinking": False,
        "add_generation_prompt": opened,
        "continue_final_message": continued,
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "g"}}], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"functions": [{"name": ""}]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "f"}}]}, "functions"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert (await refused(client, **fields))["param"] == param


async def test_neutral_openai_fields_are_accepted(client: httpx.AsyncClient) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "store": False,
        "metadata": None,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "response_format": {"type": "text"},
    }
    response = await post(client, **neutral, model="fake")
    assert response.status_code == 200, response.text
    assert "x-octavo-ignored-fields" not in response.headers
