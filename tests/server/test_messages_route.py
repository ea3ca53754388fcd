"""/v1/messages and /v1/messages/count_tokens in-process."""

import asyncio
import itertools
import json
import time
from typing import Any

import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from configs.errors import InvalidRequest, RequestFailed
from configs.settings import ServerConfig
from server.answers.delta import Answer
from server.answers.parser import AnswerParser
from server.answers.styles import HERMES, THINK
from server.anthropic.requests import CountTokensRequest, conversation
from server.anthropic.routes import Blocks
from server.app import create_app
from tests.server.fake_engine import FakeEngine

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% if tools %}<tool_call></tool_call>{% endif %}<think></think>"
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
EVENT = TypeAdapter[Any](RawMessageStreamEvent)


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO, "max_tokens": 500, **fields}
    return await client.post(PATH, json={name: value for name, value in body.items() if value is not ...})


async def answer(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await post(client, **fields)
    assert response.status_code == 200, response.text
    Message.model_validate_json(response.content, strict=True)
    return dict(response.json())


async def refused(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await post(client, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    return dict(body["error"])


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await post(client, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for piece in text.split("\n\n")[:-1]:
        name, data = piece.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "error":
            EVENT.validate_json(data.removeprefix("data: "), strict=True)
        events.append(event)
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events build up. Blocks follow each other, each with start, deltas and stop."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "partial": ""})
            is_open = True
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
        else:
            assert is_open
            block, delta = message["content"][event["index"]], event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial"}[delta["type"]]
            block[name] += delta.get("partial_json", delta.get(name))
        assert event["index"] == len(message["content"]) - 1
    assert not is_open
    for block in message["content"]:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json_object(partial)
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


async def test_shape_of_a_whole_answer(client: httpx.AsyncClient) -> None:
    whole = await answer(client, model="fake")
    assert whole.pop("id").startswith("msg_")
    assert whole == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "<hi>"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
    }


async def test_an_empty_answer_has_no_blocks(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: ""
    assert (await answer(client))["content"] == []
    assert [event["type"] for event in await stream(client)] == ["message_start", "message_delta", "message_stop"]


async def test_cached_tokens_are_no_input_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 16
    prompt = [{"role": "user", "content": "x" * 20}]
    for usage in (
        (await answer(client, messages=prompt))["usage"],
        (await stream(client, messages=prompt))[0]["message"]["usage"],
    ):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (4, 16)


async def test_max_tokens_is_required(client: httpx.AsyncClient) -> None:
    assert (await refused(client, max_tokens=...))["param"] == "max_tokens"
    assert (await refused(client, max_tokens=0))["param"] == "max_tokens"


async def test_the_limit_that_ended_the_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "x" * 5000
    whole = await answer(client, max_tokens=3)
    assert (whole["stop_reason"], whole["content"][0]["text"]) == ("max_tokens", "xxx")
    for more in (100_000, 2**63 - 1, 10**30):
        whole = await answer(client, max_tokens=more)
        assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("model_context_window_exceeded", 998)


async def test_a_prompt_is_never_cut(client: httpx.AsyncClient) -> None:
    error = await refused(client, messages=[{"role": "user", "content": "x" * 1000}])
    assert error["code"] == "context_length_exceeded"


async def test_stop_sequences(client: httpx.AsyncClient) -> None:
    whole = await answer(client, stop_sequences=["i>", "zz"])
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "i>")
    assert (await refused(client, stop_sequences=[""]))["param"] == "stop_sequences"
    assert (await refused(client, stop_sequences=["x"] * 257))["param"] == "stop_sequences"


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(client, temperature=0.5, top_p=0.25, top_k=7, stop_sequences=["q"], metadata={"user_id": "u"})
    params = engine.requests[0][2]
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.25, 7, ("q",))
    assert params.max_tokens == 500


async def test_system_and_blocks_become_messages(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    cache = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cache}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "zzz"},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "2", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "rain"}],
                    **cache,
                },
                {"type": "tool_result", "tool_use_id": "2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    engine.chat_template = TEMPLATE
    await answer(client, messages=messages, system=[{"type": "text", "text": "be brief", **cache}])
    weather = {"name": "weather", "arguments": {"city": "Paris"}}
    assert engine.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": weather},
                {"id": "2", "type": "function", "function": {"name": "clock", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1", "name": "weather"},
        {"role": "tool", "content": "Error: no clock", "tool_call_id": "2", "name": "clock"},
        {"role": "user", "content": "so?"},
    ]
    assert engine.template_kwargs == {"add_generation_prompt": True, "continue_final_message": False}


TEXT = {"type": "text", "text": "x"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("role", "block", "said"),
    [
        (
            "user",
            {"type": "image", "source": {}},
            "messages[0].content[1]: type 'image' is not supported",
        ),
        ("user", {"type": "document", "source": {}}, "'document'"),
        ("user", CALL, "hold no tool_use"),
        ("assistant", {"type": "tool_result", "tool_use_id": "toolu_1"}, "hold no tool_result"),
        (
            "system",
            {"type": "thinking", "thinking": "x"},
            "messages of role system hold no thinking",
        ),
        ("user", {"text": "x"}, "messages[0].content[1]: has no valid type"),
        ("user", {"type": "text"}, "messages[0].content[1].text: "),
        ("assistant", {**CALL, "id": 3}, "messages[0].content[1].id: "),
        ("user", {"type": "tool_result", "tool_use_id": "toolu_1"}, "no tool_use has the id 'toolu_1'"),
    ],
)
async def test_blocks_that_are_refused_are_named(
    client: httpx.AsyncClient, role: str, block: dict[str, Any], said: str
) -> None:
    error = await refused(client, messages=[{"role": role, "content": [TEXT, block]}])
    assert error["param"] == "messages"
    assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"system": 3}, "system"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        (
            {
                "tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice",
        ),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [{"input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config"),
        ({"output_config": {"task_budget": 3}}, "output_config"),
    ],
)
async def test_bad_fields_are_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert (await refused(client, **fields))["param"] == param


async def test_the_wrong_field_of_a_block_is_named(client: httpx.AsyncClient) -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": 1}]
    error = await refused(client, messages=[*HELLO, {"role": "assistant", "content": blocks}])
    assert error["message"].startswith("messages[1].content[0].signature: ")


async def test_what_asks_for_nothing_passes(client: httpx.AsyncClient) -> None:
    tool = {**WEATHER, "type": "custom", "allowed_callers": ["direct"], "cache_control": {"type": "ephemeral"}}
    response = await post(
        client, service_tier="auto", speed="standard", container=None, cache_control=None, tools=[tool], unheard_of=1
    )
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "unheard_of"


def test_many_blocks_are_joined_in_linear_time() -> None:
    blocks = [{**TEXT, "text": "x" * 200}] * 30_000
    body = CountTokensRequest.model_validate({"messages": [{"role": "user", "content": blocks}]})
    start = time.process_time()
    [message] = conversation(body, [])
    assert len(message["content"]) == 30_000 * 201 - 1
    assert time.process_time() - start < 2


async def test_a_final_assistant_message_is_continued(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    whole = await answer(client, messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert engine.messages[-1] == {"role": "assistant", "content": "The answer is ("}
    assert engine.template_kwargs == {"add_generation_prompt": False, "continue_final_message": True}
    assert whole["content"][0]["text"] == "<hi|The answer is (>"


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled", "budget_tokens": None}}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024, "display": "omitted"}}, {"enable_thinking": False}),
        ({"tool_choice": {"type": "auto", "name": None}}, {}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
async def test_thinking_is_told_to_the_template(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    await answer(client, **fields)
    assert engine.template_kwargs == {"add_generation_prompt": True, "continue_final_message": False, **kwargs}


async def test_tools_are_given_as_templates_print_them(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    await answer(client, tools=[WEATHER])
    function = {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER["input_schema"]}
    assert engine.template_kwargs["tools"] == [{"type": "function", "function": function}]
    await answer(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert not engine.template_kwargs.get("tools")


@pytest.mark.parametrize("name", ["output_config", "output_format"])
async def test_json_schema_of_the_answer(client: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    await answer(client, **{name: {"format": form} if name == "output_config" else form})
    structured = engine.requests[0][2].structured
    assert structured is not None
    assert (structured.kind, json.loads(structured.source)) == ("json_schema", {"type": "object"})
    engine.fail_after = (0, InvalidRequest("no such keyword", param="structured"))
    error = await refused(client, **{name: {"format": form} if name == "output_config" else form})
    assert error["param"] == name


async def test_reasoning_text_and_calls_are_blocks(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    engine.script = lambda prompt, params: (
        '<think>\nhm\n</think>\n\nLook:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    )
    whole = await answer(client, tools=[WEATHER])
    call = whole["content"][2]
    assert call.pop("id").startswith("toolu_")
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Look:\n"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}},
    ]
    assert whole["stop_reason"] == "tool_use"
    hidden = await answer(client, tools=[WEATHER], thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in hidden["content"]] == ["text", "tool_use"]


async def test_a_cut_call_keeps_its_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    engine.script = lambda prompt, params: '<tool_call>\n{"name": "weather", "arguments": {"city": "Par'
    whole = await answer(client, tools=[WEATHER])
    assert whole["content"][0]["input"] == {"INVALID_JSON": '{"city": "Par'}


async def test_a_wrong_model_is_not_found(client: httpx.AsyncClient) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        response = await client.post(path, json={"model": "other", "messages": HELLO, "max_tokens": 1})
        assert response.status_code == 404
        assert response.json()["type"] == "error"
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("not_found_error", "model", "model_not_found")


async def test_errors_by_time(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = (0, RequestFailed("not a number"))
    response = await post(client, stream=True)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    engine.fail_after = (2, RequestFailed("not a number"))
    events = events_of((await post(client, stream=True)).text)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["message"] == "not a number"
    assert "message_stop" not in {event["type"] for event in events}


async def test_a_body_that_is_too_large(client: httpx.AsyncClient) -> None:
    response = await post(client, system="x" * 200_000)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


async def test_other_routes_keep_their_error_object(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": 3})
    assert response.json().keys() == {"error"}


async def test_count_tokens_counts_the_same_prompt(client: httpx.AsyncClient) -> None:
    fields = {"messages": [{"role": "user", "content": "12345"}], "system": "678"}
    response = await client.post(f"{PATH}/count_tokens", json={**fields, "thinking": {"type": "disabled"}})
    count = MessageTokensCount.model_validate_json(response.content, strict=True)
    assert count.input_tokens == (await answer(client, **fields))["usage"]["input_tokens"] == 9
    response = await client.post(f"{PATH}/count_tokens", json={"messages": [{"role": "user", "content": "x" * 5000}]})
    assert response.json() == {"input_tokens": 5000}


async def test_pings_keep_a_slow_stream_alive(engine: FakeEngine) -> None:
    engine.delay = 0.1
    app = create_app(engine, ServerConfig(sse_keep_alive_interval=0.02), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        text = (await post(client, stream=True)).text
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text
    pieces = [piece for piece in text.split("\n\n") if "ping" not in piece]
    assert folded(events_of("\n\n".join(pieces)))["content"][0]["text"] == "<hi>"


CALL_TEXTS = st.builds(
    '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format,
    st.sampled_from(["weather", "unknown"]),
    st.sampled_from(['{"city": "Paris"}', "{}", '{"a": [1, {"b": null}]}', "3", '"x"', '{"cut']),
)
PARTS = st.one_of(
    CALL_TEXTS, st.text('ab <>{}\n"', max_size=8), st.sampled_from(["<tool_call>", "</think>", "<think>"])
)
SCRIPTS = st.builds(
    lambda thought, parts: thought + "".join(parts),
    st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>", "<think></think>"]),
    st.lists(PARTS, max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(SCRIPTS, st.integers(1, 60), st.booleans())
def test_streamed_and_whole_answers_are_the_same(script: str, max_tokens: int, omitted: bool) -> None:
    engine = FakeEngine(lambda prompt, params: script)
    engine.chat_template = TEMPLATE
    thinking = {"type": "adaptive", "display": "omitted" if omitted else "summarized"}
    fields = {"tools": [WEATHER], "max_tokens": max_tokens, "stop_sequences": ["ab"], "thinking": thinking}

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        transport = httpx.ASGITransport(create_app(engine, ServerConfig(), "fake"))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await answer(client, **fields), folded(await stream(client, **fields))

    answers = asyncio.run(both())
    for one in answers:
        del one["id"]
        for block in one["content"]:
            block.pop("id", None)
    assert answers[0] == answers[1]


@given(SCRIPTS, st.data())
def test_blocks_hold_what_the_parser_reads_however_the_text_is_cut(script: str, data: st.DataObject) -> None:
    def parser() -> AnswerParser:
        return AnswerParser(THINK, HERMES, {"weather": {}})

    cuts = sorted(data.draw(st.lists(st.integers(0, len(script)), max_size=6)))
    cut, blocks = parser(), Blocks()
    for start, end in zip([0, *cuts], [*cuts, len(script)], strict=True):
        blocks.add(cut.push(script[start:end]))
    blocks.add(cut.push("", ended=True))
    blocks.close()
    found = Answer("", "", [])
    calls = []
    for block in blocks.content:
        if block["type"] == "thinking":
            found.reasoning += block["thinking"]
        elif block["type"] == "text":
            found.content += block["text"]
        else:
            calls.append((block["name"], block["input"]))
    expected = parser().parse(script)
    assert (found.reasoning, found.content) == (expected.reasoning, expected.content)
    assert calls == [(call.name, json_object(call.arguments)) for call in expected.tool_calls]


ROLES = st.sampled_from(["user", "assistant", "system"])


@given(st.lists(st.tuples(ROLES, st.lists(st.text("xy", max_size=2), max_size=2)), min_size=1, max_size=6))
def test_turns_of_one_role_are_one_message(turns: list[tuple[Any, list[str]]]) -> None:
    messages = [{"role": role, "content": [{"type": "text", "text": text} for text in texts]} for role, texts in turns]
    body = CountTokensRequest.model_validate({"messages": messages})
    if not any(texts for _, texts in turns):
        with pytest.raises(InvalidRequest):
            conversation(body, [])
        return
    joined = conversation(body, [])
    roles = [message["role"] for message in joined]
    assert all(left != right for left, right in itertools.pairwise(roles))
    said = "".join(text for _, texts in turns for text in texts)
    assert "".join(message["content"] for message in joined).replace("\n", "") == said
