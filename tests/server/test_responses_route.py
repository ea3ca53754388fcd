"""/v1/responses, in-process; the oracle for shapes is the OpenAI client's own types, strictly validated."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from configs.errors import EngineDead, RequestFailed
from configs.settings import ServerConfig
from server.app import create_app
from tests.server.fake_engine import FakeEngine

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEMPLATE = "{{ tools }} <tool_call> </tool_call> <think> </think> developer"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
DELTAS = ("reasoning_text", "output_text", "function_call_arguments")
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


@pytest.fixture
def engine() -> FakeEngine:
    """Its template teaches `<think>` parts and tool calls."""
    fake = FakeEngine()
    fake.chat_template = TEMPLATE
    return fake


def client_of(engine: FakeEngine, **fields: Any) -> httpx.AsyncClient:
    app = create_app(engine, ServerConfig(**fields), "fake")
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def says(engine: FakeEngine, text: str) -> None:
    engine.script = lambda prompt, params: text


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content, strict=True)
    content: dict[str, Any] = response.json()
    return content


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/responses", json={"input": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    return events_of(response.text)


def events_of(text: str, first: int = 0) -> list[dict[str, Any]]:
    assert text.endswith("\n\n")
    events = []
    for number, piece in enumerate(text[:-2].split("\n\n"), start=first):
        name, data = piece.split("\n")
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


async def refusal(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", json={"input": "hi", **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """What does not differ between equal responses."""
    items = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": items}


def kinds(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        yield event["type"].removeprefix("response.")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instructions": "be brief", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s"},
        {"temperature": 0, "top_p": 0.5, "max_output_tokens": 2, "prompt_cache_key": "k", "max_tool_calls": 3},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        },
        {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
        {"reasoning": {"effort": "low", "summary": "auto"}, "store": False, "truncation": "disabled"},
        LOGPROBS,
    ],
)
async def test_answers_pass_strict_validation(client: httpx.AsyncClient, engine: FakeEngine, fields: Any) -> None:
    says(engine, f"<think>\nso\n</think>\n\nyes{CALL}{CALL}")
    whole = await post(client, **fields)
    events = await stream(client, **fields)
    assert without_names(events[-1]["response"]) == without_names(whole)


async def test_tools_come_back_as_they_were_given(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 2**70}}}
    tools = [{**TOOL, "parameters": schema, "unknown": 1}, {"type": "web_search"}]
    for answer in (await post(client, tools=tools), (await stream(client, tools=tools))[-1]["response"]):
        assert answer["tools"] == [{**TOOL, "parameters": schema}]
        assert (await client.get(f"/v1/responses/{answer['id']}")).json() == answer


async def test_types_may_be_left_out_where_there_is_one(client: httpx.AsyncClient) -> None:
    function = {"name": "f", "parameters": {}, "strict": False}
    space = {"type": "namespace", "name": "n", "description": "d"}
    reasoning = {"type": "reasoning", "summary": [{"text": "short"}], "content": [{"text": "hm"}]}
    response = await post(
        client,
        input=[reasoning, {"role": "user", "content": "hi"}],
        tools=[function, {**space, "tools": [function]}],
        tool_choice={"type": "function", "name": "f", "function": None},
    )
    typed = {"type": "function", **function}
    assert response["tools"] == [typed, {**space, "tools": [typed]}]
    listed = (await client.get(f"/v1/responses/{response['id']}/input_items")).json()["data"]
    assert (listed[1]["summary"], listed[1]["content"]) == (
        [{"type": "summary_text", "text": "short"}],
        [{"type": "reasoning_text", "text": "hm"}],
    )


async def test_wrong_parameters_of_a_query_are_named(client: httpx.AsyncClient) -> None:
    answer = await post(client)
    for query, param in (("stream=maybe", "stream"), ("starting_after=-2", "starting_after")):
        refused = await client.get(f"/v1/responses/{answer['id']}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await client.get(f"/v1/responses/{answer['id']}?unknown=1")).json() == answer


async def test_events_come_in_order(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, f"<think>so</think>yes{CALL}")
    events = await stream(client, tools=[TOOL])
    once = [kind for index, kind in enumerate(kinds(events)) if kind != list(kinds(events))[index - 1]]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    output = events[-1]["response"]["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert output == done
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    for index, (item, kind) in enumerate(zip(output, DELTAS, strict=True)):
        within = [event for event in events if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in within} == {index}
        text = "".join(event["delta"] for event in within if event["type"] == f"response.{kind}.delta")
        assert text == (item["arguments"] if kind == "function_call_arguments" else item["content"][0]["text"])


TEXT = st.text(st.sampled_from('ab \n<>{}"/'), max_size=8)
ANSWER = st.lists(TEXT | st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", "é"]), max_size=6).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(ANSWER, st.integers(1, 60), st.booleans())
async def test_streamed_and_whole_answers_are_the_same(text: str, limit: int, logprobs: bool) -> None:
    engine = FakeEngine(lambda prompt, params: text)
    engine.chat_template = TEMPLATE
    fields: dict[str, Any] = {"max_output_tokens": limit, "tools": [TOOL], **(LOGPROBS if logprobs else {})}
    async with client_of(engine) as client:
        whole = await post(client, **fields)
        events = await stream(client, **fields)
        final = events[-1]["response"]
        assert without_names(final) == without_names(whole)
        assert (await client.get(f"/v1/responses/{final['id']}")).json() == final
    assert whole["status"] == ("incomplete" if limit <= len(text.encode()) else "completed")
    assert final["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]


async def test_an_answer_that_is_cut(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, "<think>abcdef")
    answer = await post(client, max_output_tokens=10)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = answer["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "abc")
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 10}


async def test_usage_counts_reasoning(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, "<think>abc</think>de")
    engine.num_cached_tokens = 1
    usage = (await post(client))["usage"]
    reasoning = usage["output_tokens_details"]["reasoning_tokens"]
    assert len("<think>abc") <= reasoning <= len("<think>abc</think>")
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (2, 21, 23)
    assert usage["input_tokens_details"]["cached_tokens"] == 1


async def test_logprobs_are_those_of_the_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, f"<think>so</think>yes <b>{CALL}")
    [_, message, _] = (await post(client, tools=[TOOL], **LOGPROBS))["output"]
    part = message["content"][0]
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"] == "yes <b>"
    assert all(len(one["top_logprobs"]) == 1 for one in part["logprobs"])


async def test_an_empty_answer_is_an_empty_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    says(engine, "")
    [item] = (await post(client))["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "input"),
        ({"tools": [TOOL, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["f"]}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [TOOL]}, "tools": [TOOL]}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 21, "include": LOGPROBS["include"]}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"truncation": "left"}, "truncation"),
        ({"truncation": "auto", "input": "x" * 1001}, "input"),
        ({"truncation": "auto", "input": "x" * 900, "max_output_tokens": 200}, "max_output_tokens"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, fields: Any, param: str
) -> None:
    assert (await refusal(client, **fields))["param"] == param
    assert not engine.requests


async def test_a_refused_part_is_named(client: httpx.AsyncClient) -> None:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}]
    error = await refusal(client, input=[{"role": "user", "content": content}])
    expected = "type must be one of 'input_text', 'output_text', 'refusal'; got 'input_image'"
    assert error["message"] == f"input[0].content[1]: {expected}"


async def test_an_input_that_does_not_fit_is_refused(client: httpx.AsyncClient) -> None:
    error = await refusal(client, input="x" * 2000, max_output_tokens=1)
    assert error["code"] == "context_length_exceeded"
    error = await refusal(client, min_tokens=3, max_output_tokens=2)
    assert error["param"] == "min_tokens"


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, max_output_tokens=7, top_k=3, seed=5, stop="z", priority=2, cache_salt="s", **LOGPROBS)
    [(name, _, params, priority, salt)] = engine.requests
    assert name.startswith("resp_")
    assert (params.max_tokens, params.top_k, params.seed, params.stop, params.logprobs) == (7, 3, 5, ("z",), 1)
    assert (priority, salt) == (2, "s")
    assert params.structured is None


async def test_the_formats_of_text_constrain(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = None
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    await post(client, text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
    await post(client, structured_outputs={"regex": "a+"})
    first, second = (params.structured for _, _, params, _, _ in engine.requests)
    assert first
    assert second
    assert json.loads(first.source) == schema
    assert (second.kind, second.source) == ("regex", "a+")


async def test_reasoning_effort_reaches_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, reasoning={"effort": "none"})
    assert engine.template_kwargs["enable_thinking"] is False
    assert engine.template_kwargs["reasoning_effort"] == "none"


async def test_an_error_before_the_first_token_has_a_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for streamed in (False, True):
        engine.fail_after = (0, RequestFailed("not a number"))
        response = await client.post("/v1/responses", json={"input": "hi", "stream": streamed})
        assert response.status_code == 500
    engine.is_dead = True
    assert (await client.post("/v1/responses", json={"input": "hi"})).status_code == 503


@pytest.mark.parametrize("background", [False, True])
async def test_an_error_in_a_stream_is_its_end(client: httpx.AsyncClient, engine: FakeEngine, background: bool) -> None:
    engine.fail_after = (2, EngineDead())
    events = await stream(client, background=background)
    *_, error, failed = events
    assert (error["type"], error["code"]) == ("error", "engine_dead")
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["output"][0]["status"] == "incomplete"
    assert (await client.get(f"/v1/responses/{response['id']}")).json() == response


async def test_pages_of_input_items(client: httpx.AsyncClient) -> None:
    first = await post(client, input=[{"role": "user", "content": str(number)} for number in range(3)])
    second = await post(client, input="last", previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    texts: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = await client.get(path, params={"order": "asc", "limit": 2, **after})
        ResponseItemList.model_validate_json(page.content, strict=True)
        texts += [item["content"][0]["text"] for item in page.json()["data"]]
        if not page.json()["has_more"]:
            break
        after = {"after": page.json()["last_id"]}
    assert texts == ["0", "1", "2", "<0|1|2>", "last"]
    newest = (await client.get(path)).json()["data"]
    assert [item["content"][0]["text"] for item in newest] == texts[::-1]
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
        answer = await client.get(f"{path}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("limit", "room"), [({}, 750), ({"max_output_tokens": 100}, 900)])
async def test_truncation_auto_drops_the_oldest_items(
    client: httpx.AsyncClient, engine: FakeEngine, limit: dict[str, int], room: int
) -> None:
    turns = [{"role": ("user", "assistant")[index % 2], "content": f"{index:02d}" * 20} for index in range(49)]
    said = {"input": turns, "instructions": "be brief", **limit}
    assert (await refusal(client, **said))["code"] == "context_length_exceeded"
    response = await client.post("/v1/responses", json={**said, "truncation": "auto"})
    assert response.status_code == 200, response.text
    first, *kept = engine.messages
    assert first == {"role": "system", "content": "be brief"}
    assert kept == turns[-len(kept) :]
    assert int(response.headers["x-octavo-dropped-messages"]) == len(turns) - len(kept)
    assert room - 2 * 41 < len(engine.requests[0][1]) <= room
    assert response.json()["truncation"] == "auto"
    items = await client.get(f"/v1/responses/{response.json()['id']}/input_items?limit=100")
    assert len(items.json()["data"]) == len(turns)
    response = await client.post("/v1/responses", json={"input": "hi", "truncation": "auto"})
    assert "x-octavo-dropped-messages" not in response.headers
