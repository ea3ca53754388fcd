"""/v1/chat/completions in-process: tools, reasoning, structured answers, and that streams equal whole answers."""

import json
import time
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from configs.sampling import Reasoning, ThinkingBudget
from configs.settings import ServerConfig
from server.app import create_app
from tests.server.fake_engine import FakeEngine, two_beams
from tests.server.test_chat_route import HELLO, PATH, answer, refused, stream

HERMES = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>"
THINKING = HERMES + "</think>"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, it\'s {here}"}}\n</tool_call>'


def says(engine: FakeEngine, text: str, template: str = HERMES) -> None:
    engine.chat_template = template
    engine.script = lambda prompt, params: text


async def test_a_tool_call(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, CALL)
    [choice] = (await answer(client, tools=[WEATHER]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call.pop("id")
    arguments = json.loads(call["function"].pop("arguments"))
    assert call == {"type": "function", "function": {"name": "get_weather"}}
    assert arguments == {"city": "Paris, it's {here}"}
    assert engine.template_kwargs["tools"] == [WEATHER]
    assert engine.requests[0][2].structured is None


async def test_the_template_for_chats_with_tools_says_how_calls_are_written(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    says(engine, CALL, "{{ messages }}")
    engine.own_tool_template = HERMES
    [choice] = (await answer(client, tools=[WEATHER]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert engine.template_kwargs["tools"] == [WEATHER]
    assert "get_weather" not in str(engine.messages)
    [choice] = (await answer(client))["choices"]
    assert choice["message"]["content"] == CALL


async def test_a_streamed_tool_call_names_itself_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, "Let me see.\n" + CALL + "\n" + CALL)
    chunks = [chunk["choices"][0] for chunk in await stream(client, tools=[WEATHER])]
    pieces = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    for index in (0, 1):
        first, *others = [piece for piece in pieces if piece["index"] == index]
        assert first["id"]
        assert (first["type"], first["function"]["name"]) == ("function", "get_weather")
        assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in others)
        text = "".join(piece["function"]["arguments"] for piece in [first, *others])
        assert json.loads(text) == {"city": "Paris, it's {here}"}
        assert len(others) > 5
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks).strip() == "Let me see."
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert all(chunk["delta"] for chunk in chunks[:-1]), "a chunk that says nothing"
    assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])


async def test_without_tools_a_call_is_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, CALL)
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        [choice] = (await answer(client, **fields))["choices"]
        assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert "tools" not in engine.template_kwargs


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "get_time"}), ({"type": "function", "function": {"name": "get_time"}}, {"get_time"})],
)
async def test_forced_calls_have_a_grammar(
    client: httpx.AsyncClient, engine: FakeEngine, choice: Any, names: set[str]
) -> None:
    says(engine, CALL)
    await answer(client, tools=[WEATHER, TIME], tool_choice=choice)
    structured = engine.requests[0][2].structured
    assert structured is not None
    assert structured.kind == "structural_tag"
    assert {name for name in ("get_weather", "get_time") if name in structured.source} == names
    assert {tool["function"]["name"] for tool in engine.template_kwargs["tools"]} == names


async def test_templates_without_tools_get_them_described(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, CALL, template="{{ messages }}")
    history = [
        {"role": "developer", "content": "Be brief."},
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    [choice] = (await answer(client, messages=history, tools=[WEATHER]))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [message["role"] for message in engine.messages] == ["system", "user", "assistant", "user"]
    assert engine.messages[0]["content"].startswith("Be brief.")
    assert "get_weather" in engine.messages[0]["content"]
    assert "42" in engine.messages[3]["content"]
    assert "tools" not in engine.template_kwargs


async def test_developers_keep_their_role_where_the_template_has_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    says(engine, "x", template="{% if message.role == 'developer' %}")
    await answer(client, messages=[{"role": "developer", "content": "a"}, *HELLO])
    assert engine.messages[0]["role"] == "developer"


async def test_reasoning_is_split_off(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, "<think>\nhm\n</think>\n\nyes", THINKING)
    [choice] = (await answer(client))["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "yes")
    [choice] = (await answer(client, include_reasoning=False))["choices"]
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"] == "yes"
    deltas = [chunk["choices"][0]["delta"] for chunk in await stream(client)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


@pytest.mark.parametrize(
    ("prompt", "said", "reasoning", "content"),
    [
        ("x<think>\n", "hm</think>yes", "hm", "yes"),
        ("x<think>\n\n</think>\n\n", "<think>yes", None, "<think>yes"),
        ("x", "yes", None, "yes"),
    ],
)
async def test_the_prompt_may_open_or_close_the_reasoning(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: str, said: str, reasoning: str | None, content: str
) -> None:
    says(engine, said, THINKING)
    [choice] = (await answer(client, messages=[{"role": "user", "content": prompt}]))["choices"]
    assert choice["message"].get("reasoning_content") == reasoning
    assert choice["message"]["content"] == content


async def test_reasoning_comes_before_a_structured_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, "<think>hm</think>{}", THINKING)
    schema = {"type": "object"}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    [choice] = (await answer(client, response_format=response_format))["choices"]
    assert choice["message"]["content"] == "{}"
    structured = engine.requests[0][2].structured
    assert structured is not None
    assert structured.kind == "structural_tag"
    assert "</think>" in structured.source
    says(engine, "{}")
    await answer(client, response_format=response_format)
    structured = engine.requests[1][2].structured
    assert structured is not None
    assert (structured.kind, json.loads(structured.source)) == ("json_schema", schema)


async def test_markers_that_are_special_tokens_stay_in_the_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.tokenizer.special_texts = {"<tool_call>": 200}
    says(engine, CALL)
    await answer(client, tools=[WEATHER])
    await answer(client)
    assert [request[2].shown_token_ids for request in engine.requests] == [(200,), ()]


async def test_the_tool_parser_can_be_named() -> None:
    engine = FakeEngine(lambda prompt, params: '[get_weather(city="Rome")]')
    app = create_app(engine, ServerConfig(tool_call_parser="pythonic"), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        [choice] = (await answer(client, tools=[WEATHER]))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


async def test_echo_of_a_continued_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, " world")
    messages = [*HELLO, {"role": "assistant", "content": "Hello"}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    assert (await answer(client, **fields))["choices"][0]["message"]["content"] == "Hello world"
    deltas = [chunk["choices"][0]["delta"] for chunk in await stream(client, **fields)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello world"


async def test_token_ids_and_prompt_logprobs(client: httpx.AsyncClient) -> None:
    whole = await answer(client, return_token_ids=True, prompt_logprobs=0)
    assert whole["prompt_token_ids"] == [*b"hi"]
    assert whole["choices"][0]["token_ids"] == [*b"<hi>", 257]
    assert [entry and set(entry) for entry in whole["prompt_logprobs"]] == [None, {str(ord("i"))}]
    chunks = await stream(client, return_token_ids=True, prompt_logprobs=0)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    ids = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]


async def test_reasoning_effort_is_for_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(client, reasoning_effort="none")
    assert engine.template_kwargs["enable_thinking"] is False
    await answer(client, reasoning_effort="high", documents=[{"text": "a"}])
    assert engine.template_kwargs["reasoning_effort"] == "high"
    assert engine.template_kwargs["documents"] == [{"text": "a"}]


async def test_no_tool_is_named_that_was_not_offered(client: httpx.AsyncClient) -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    assert (await refused(client, tools=[WEATHER], tool_choice=choice))["param"] == "tool_choice"


PIECES = st.sampled_from(
    [CALL, "<tool_call>", "<think>", "</think>", "hm\n", "\n", " ", '{"name": "get_time"}', "</tool_call>", "text", "<"]
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(PIECES, max_size=6), limit=st.sampled_from([None, None, 7, 30]), n=st.sampled_from([1, 2]))
async def test_streamed_equals_whole(pieces: list[str], limit: int | None, n: int) -> None:
    text = "".join(pieces)
    engine = FakeEngine(lambda prompt, params: text)
    engine.chat_template = THINKING
    body = {"messages": HELLO, "tools": [WEATHER, TIME], "max_tokens": limit, "logprobs": True, "n": n}
    app = create_app(engine, ServerConfig(), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post(PATH, json=body)
        options = {"include_usage": True}
        streamed = await client.post(PATH, json={**body, "stream": True, "stream_options": options})
    whole = response.json()
    ChatCompletion.model_validate_json(response.content, strict=True)
    lines = streamed.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    events = [line.removeprefix("data: ") for line in lines]
    for event in events:
        ChatCompletionChunk.model_validate_json(event, strict=True)
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [one for chunk in chunks[:-1] for one in chunk["choices"] if one["index"] == choice["index"]]
        assert joined(mine) == without_ids(choice)


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    logprobs = []
    for chunk in chunks:
        logprobs += (chunk["logprobs"] or {"content": []})["content"]
        for piece in chunk["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return {
        "content": "".join(chunk["delta"].get("content", "") for chunk in chunks),
        "reasoning": "".join(chunk["delta"].get("reasoning_content", "") for chunk in chunks),
        "calls": calls,
        "logprobs": logprobs,
        "finish_reason": chunks[-1]["finish_reason"],
    }


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [call["function"] for call in message.get("tool_calls", [])],
        "logprobs": choice["logprobs"]["content"],
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize(("prompt", "opening"), [("x<think>\n", ""), ("x", "<think>")])
@pytest.mark.parametrize(
    ("written", "end"),
    [
        ("", "</think>"),
        ("'</think>\\n\\n' + x", "</think>\n\n"),
        ("'</think>\\n' + '</think>\\n\\n\\n'", "</think>\n\n"),
    ],
)
async def test_a_thinking_budget_knows_the_markers(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: str, opening: str, written: str, end: str
) -> None:
    says(engine, "hm</think>yes", THINKING + written)
    await answer(client, messages=[{"role": "user", "content": prompt}], thinking_token_budget=5)
    params = engine.requests[0][2]
    assert msgspec.structs.replace(params.thinking, spellings={}) == ThinkingBudget(
        5, tuple(end.encode()), closing="</think>", opening=opening
    )
    assert params.reasoning == Reasoning("</think>", opening)
    says(engine, "yes")
    await answer(client, thinking_token_budget=5)
    await answer(client, thinking_token_budget=-1)
    assert engine.requests[1][2].thinking is engine.requests[2][2].thinking is None


async def test_errors_name_the_requests_fields(client: httpx.AsyncClient) -> None:
    long = [{"role": "user", "content": "x" * 2000}]
    assert (await refused(client, messages=long))["param"] == "messages"
    assert (await refused(client, max_tokens=5000))["param"] == "max_tokens"
    assert (await refused(client, max_completion_tokens=5000))["param"] == "max_completion_tokens"


async def test_a_template_of_the_requests_own_needs_trust(client: httpx.AsyncClient) -> None:
    assert "--trust-request-chat-template" in (await refused(client, chat_template="{{ 1 }}"))["message"]
    engine = FakeEngine()
    app = create_app(engine, ServerConfig(trust_request_chat_template=True), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as trusting:
        await answer(trusting, chat_template="{{ 1 }}", chat_template_kwargs={"a": 1})
    assert engine.template_kwargs == {
        "chat_template": "{{ 1 }}", "a": 1, "add_generation_prompt": True, "continue_final_message": False
    }  # fmt: skip


async def test_beam_search_is_refused_where_it_would_pass_something_over(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.logprobs = two_beams  # type: ignore[method-assign]
    tools = {"tools": [WEATHER], "tool_choice": "required"}
    assert (await refused(client, use_beam_search=True, **tools))["param"] == "use_beam_search"
    assert (await answer(client, use_beam_search=True, tools=[WEATHER]))["choices"][0]["message"]["content"] == "long"


async def test_echo_needs_a_message_to_continue(client: httpx.AsyncClient) -> None:
    assert (await refused(client, echo=True))["param"] == "echo"


@pytest.mark.parametrize("template", [HERMES, HERMES.replace("<tool_call>", "[TOOL_CALLS]")])
async def test_many_tools(client: httpx.AsyncClient, engine: FakeEngine, template: str) -> None:
    says(engine, "x", template)
    many = [{"type": "function", "function": {"name": f"f{number}", "parameters": {}}} for number in range(257)]
    assert (await refused(client, tools=many))["param"] == "tools"
    assert (await refused(client, functions=[one["function"] for one in many]))["param"] == "functions"
    began = time.perf_counter()
    await answer(client, tools=many[1:], tool_choice="required")
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "fetch"}}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_of_a_schema_cannot_be_enforced_is_named_and_not_refused(
    client: httpx.AsyncClient, engine: FakeEngine, choice: Any, streamed: bool
) -> None:
    says(engine, '<tool_call>\n{"name": "fetch", "arguments": {"tags": []}}\n</tool_call>')
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "uniqueItems": True},
            "n": {"multipleOf": 0.5},
            "of": {"$ref": "#/nowhere"},
        },
    }
    function = {"name": "fetch", "parameters": schema}
    body = {
        "messages": HELLO,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "stream": streamed,
    }
    response = await client.post(PATH, json=body)
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "fetch: tags.uniqueItems, fetch: n.multipleOf, fetch: of.$ref"
    assert "uniqueItems" not in engine.requests[0][2].structured.source
    assert engine.template_kwargs["tools"][0]["function"] == function
    function["strict"] = True
    response = await client.post(PATH, json=body)
    assert "x-octavo-ignored-fields" not in response.headers
    assert "uniqueItems" in engine.requests[1][2].structured.source  # which the core refuses
