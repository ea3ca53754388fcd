"""The Responses API with the real OpenAI client against a real port."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import ResponseCompletedEvent

from configs.errors import RequestFailed
from tests.server.fake_engine import FakeEngine
from tests.server.test_responses_route import CALL, TEMPLATE


class Point(pydantic.BaseModel):
    x: int


class f(pydantic.BaseModel):
    """A function's arguments."""

    x: int


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def says(engine: FakeEngine, text: str, delay: float = 0) -> None:
    engine.script = lambda prompt, params: text
    engine.delay = delay


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_input_tokens_are_those_that_a_response_counts(api: openai.OpenAI) -> None:
    first = api.responses.create(model="fake", input="hi")
    asked: Any = {"model": "fake", "input": "and you?", "previous_response_id": first.id, "instructions": "be brief"}
    counted = api.responses.input_tokens.count(**asked)
    made = api.responses.create(**asked)
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens > 20


def test_create_and_retrieve_and_delete(api: openai.OpenAI) -> None:
    made = api.responses.create(model="fake", input="hi")
    assert made.output_text == "<hi>"
    assert api.responses.retrieve(made.id) == made
    api.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.delete(made.id)


def test_a_stream(api: openai.OpenAI) -> None:
    with api.responses.create(model="fake", input="hi", stream=True) as events:
        received = list(events)
    assert "".join(event.delta for event in received if event.type == "response.output_text.delta") == "<hi>"
    assert isinstance(received[-1], ResponseCompletedEvent)
    assert received[-1].response == api.responses.retrieve(received[-1].response.id)


def test_structured_answers(api: openai.OpenAI, engine: FakeEngine) -> None:
    says(engine, '{"x": 3}')
    parsed = api.responses.parse(model="fake", input="hi", text_format=Point)
    assert parsed.output_parsed == Point(x=3)
    with api.responses.stream(model="fake", input="hi", text_format=Point) as events:
        snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert snapshots[-1] == '{"x": 3}'
    assert final.output_parsed == Point(x=3)
    structured = engine.requests[0][2].structured
    assert structured
    assert json.loads(structured.source)["properties"]["x"]["type"] == "integer"


def test_a_conversation_with_a_function(api: openai.OpenAI, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    says(engine, f"<think>so</think>{CALL}")
    tools: Any = [openai.pydantic_function_tool(f)["function"] | {"type": "function"}]
    with api.responses.stream(model="fake", input="hi", tools=tools) as events:
        answer = events.get_final_response()
    reasoning, call = answer.output
    assert reasoning.type == "reasoning"
    assert call.type == "function_call"
    assert (call.name, call.parsed_arguments) == ("f", {"x": 1})
    says(engine, "done")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
    by_id = api.responses.create(model="fake", input=output, previous_response_id=answer.id)
    assert by_id.output_text == "done"
    sent = engine.messages
    history: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in answer.output), *output]
    api.responses.create(model="fake", input=history, store=False)
    assert engine.messages == sent
    assert sent == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "so",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "name": "f", "content": "2"},
    ]


def test_a_chain(api: openai.OpenAI, engine: FakeEngine) -> None:
    first = api.responses.create(model="fake", input="a", instructions="not inherited")
    second = api.responses.create(model="fake", input="b", previous_response_id=first.id, instructions="new")
    assert [message["content"] for message in engine.messages] == ["new", "a", "<not inherited|a>", "b"]
    assert second.previous_response_id == first.id
    api.responses.delete(first.id)
    third = api.responses.create(model="fake", input="c", previous_response_id=second.id)
    assert len(list(api.responses.input_items.list(third.id, limit=2))) == 5
    with pytest.raises(openai.NotFoundError) as caught:
        api.responses.create(model="fake", input="b", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_items_can_be_named(api: openai.OpenAI, engine: FakeEngine) -> None:
    first = api.responses.create(model="fake", input="a")
    reference: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "b"}]
    api.responses.create(model="fake", input=reference)
    assert [message["content"] for message in engine.messages] == ["<a>", "b"]
    api.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError):
        api.responses.create(model="fake", input=reference)


def test_what_is_not_stored_cannot_be_found(api: openai.OpenAI) -> None:
    whole = api.responses.create(model="fake", input="a", store=False)
    with api.responses.create(model="fake", input="a", store=False, stream=True) as events:
        last = list(events)[-1]
    assert isinstance(last, ResponseCompletedEvent)
    for response_id in (whole.id, last.response.id):
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(response_id)


async def test_async_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        calls = [api.responses.create(model="fake", input=str(number)) for number in range(20)]
        answers = await asyncio.gather(*calls)
        async with api.responses.stream(model="fake", input="x") as events:
            final = await events.get_final_response()
    assert [one.output_text for one in answers] == [f"<{number}>" for number in range(20)]
    assert final.output_text == "<x>"


def test_errors_become_the_clients_exceptions(api: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model="fake", input="hi", tools=[{"type": "function", "name": 5}])  # type: ignore[list-item,typeddict-item]
    assert caught.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        api.responses.create(model="other", input="hi")
    engine.fail_after = (2, RequestFailed("not a number"))
    with api.responses.create(model="fake", input="hi", stream=True) as events:
        *_, error, failed = events
    assert (error.type, error.message) == ("error", "not a number")
    assert failed.type == "response.failed"
    assert failed.response.error
    assert failed.response.error.message == "not a number"


async def test_a_background_response_is_polled(url: str, engine: FakeEngine) -> None:
    says(engine, "x" * 20, delay=0.02)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        made = await api.responses.create(model="fake", input="hi", background=True)
        assert made.status == "queued"
        with pytest.raises(openai.BadRequestError, match="still running"):
            await api.responses.create(model="fake", input="hi", previous_response_id=made.id)
        statuses, lengths = [made.status], [0]
        while made.status in ("queued", "in_progress"):
            made = await api.responses.retrieve(made.id)
            statuses.append(made.status)
            lengths.append(len(made.output_text))
        assert list(dict.fromkeys(statuses)) == ["queued", "in_progress", "completed"]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 20
        assert any(0 < length < 20 for length in lengths)
        assert await api.responses.cancel(made.id) == made


@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_a_background_response_can_be_ended(url: str, engine: FakeEngine, end: str) -> None:
    says(engine, "x" * 900, delay=0.01)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        made = await api.responses.create(model="fake", input="hi", background=True)
        await until(lambda: engine.num_tokens > 3)
        if end == "cancel":
            ended = await api.responses.cancel(made.id)
            assert ended.status == "cancelled"
            assert ended.output_text.startswith("xxx")
            assert await api.responses.retrieve(made.id) == ended
        else:
            await api.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError):
                await api.responses.retrieve(made.id)
        assert engine.aborted == [f"{made.id}-0"]


def test_only_background_responses_can_be_cancelled(api: openai.OpenAI) -> None:
    made = api.responses.create(model="fake", input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.retrieve(made.id, stream=True)
    assert caught.value.param == "stream"


async def test_a_background_stream_can_be_left_and_taken_up(url: str, engine: FakeEngine) -> None:
    says(engine, "abcdefghij", delay=0.01)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        seen: list[Any] = []
        async with await api.responses.create(model="fake", input="hi", background=True, stream=True) as events:
            async for event in events:
                seen.append(event)
                if len(seen) == 8:
                    break
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        response_id = seen[0].response.id
        rest = await api.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
        seen += [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "abcdefghij"
        assert seen[-1].response == await api.responses.retrieve(response_id)
        again = await api.responses.retrieve(response_id, stream=True)
        assert [event async for event in again] == seen
    assert not engine.aborted


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_goes_away_aborts_its_response(url: str, engine: FakeEngine, streamed: bool) -> None:
    says(engine, "x" * 900, delay=0.02)
    async with httpx.AsyncClient() as http:
        body = {"input": "a", "stream": streamed}
        request = asyncio.create_task(http.post(f"{url}/v1/responses", json=body))
        await until(lambda: engine.num_tokens > 2)
        response_id = engine.requests[0][0].removesuffix("-0")
        running = await http.get(f"{url}/v1/responses/{response_id}")
        assert running.json().get("status") == ("in_progress" if streamed else None)
        request.cancel()
    await until(lambda: len(engine.aborted) == 1)
    left = httpx.get(f"{url}/v1/responses/{response_id}")
    assert left.json().get("status") == ("cancelled" if streamed else None)
