"""The real Anthropic client against a real port, with a scripted engine."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock

from configs.errors import RequestFailed
from tests.server.fake_engine import FakeEngine

HELLO: Any = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% if tools %}<tool_call></tool_call>{% endif %}<think></think>"
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ANSWER = '<think>\nhm\n</think>\n\nLook:<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def api(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_models(api: anthropic.Anthropic) -> None:
    [model] = api.models.list()
    validated = type(model).model_validate_json(model.to_json(), strict=True)
    assert (validated.id, validated.display_name, validated.type) == ("fake", "fake", "model")
    assert abs(validated.created_at.timestamp() - time.time()) < 100
    assert api.models.retrieve("fake") == model


def test_create(api: anthropic.Anthropic) -> None:
    message = api.messages.create(model="fake", max_tokens=100, messages=HELLO, system="be brief")
    assert [block.text for block in message.content if block.type == "text"] == ["<be brief|hi>"]
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 11, 14)


def test_create_streamed(api: anthropic.Anthropic) -> None:
    with api.messages.create(model="fake", max_tokens=100, messages=HELLO, stream=True) as events:
        received = list(events)
    texts = [
        event.delta.text
        for event in received
        if event.type == "content_block_delta" and event.delta.type == "text_delta"
    ]
    assert "".join(texts) == "<hi>"
    assert received[-1].type == "message_stop"


def test_stream_helper(api: anthropic.Anthropic) -> None:
    with api.messages.stream(model="fake", max_tokens=100, messages=HELLO, stop_sequences=[">"]) as stream:
        assert "".join(stream.text_stream) == "<hi"
        message = stream.get_final_message()
    assert (message.stop_reason, message.stop_sequence, message.usage.output_tokens) == ("stop_sequence", ">", 4)


def test_thinking_and_tool_use(api: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    engine.script = lambda prompt, params: ANSWER
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    fields: Any = {"max_tokens": 900, "messages": HELLO, "tools": [WEATHER], "thinking": thinking}
    with api.messages.stream(model="fake", **fields) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert "".join(partial) == '{"city": "Paris"}'
    for message in (streamed, api.messages.create(model="fake", **fields)):
        thought, text, call = message.content
        assert isinstance(thought, ThinkingBlock)
        assert isinstance(text, TextBlock)
        assert isinstance(call, ToolUseBlock)
        assert (thought.thinking, text.text) == ("hm", "Look:")
        assert (call.name, call.input) == ("weather", {"city": "Paris"})
        assert message.stop_reason == "tool_use"


def test_answers_can_be_sent_back(api: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    engine.script = lambda prompt, params: ANSWER
    first = api.messages.create(model="fake", max_tokens=500, messages=HELLO, tools=[WEATHER])
    call = first.content[-1]
    assert isinstance(call, ToolUseBlock)
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
    history = [*HELLO, {"role": "assistant", "content": first.content}, result]
    api.messages.create(model="fake", max_tokens=500, messages=history, tools=[WEATHER])
    assistant, tool = engine.messages[1:]
    assert (assistant["reasoning_content"], assistant["content"]) == ("hm", "Look:")
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"]
    assert (tool["content"], tool["name"]) == ("rain", "weather")


def test_structured_output(api: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: '{"a": 1}'
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    message = api.messages.create(model="fake", max_tokens=100, messages=HELLO, output_config=form)
    assert isinstance(message.content[0], TextBlock)
    assert message.content[0].text == '{"a": 1}'
    assert engine.requests[0][2].structured is not None


def test_beta_interface(api: anthropic.Anthropic) -> None:
    message = api.beta.messages.create(model="fake", max_tokens=100, messages=HELLO, betas=["some-beta-2025-01-01"])
    assert [block.text for block in message.content if block.type == "text"] == ["<hi>"]


def test_count_tokens(api: anthropic.Anthropic) -> None:
    assert api.messages.count_tokens(model="fake", messages=HELLO, tools=[WEATHER]).input_tokens >= 2


def test_errors_become_the_clients_exceptions(api: anthropic.Anthropic, engine: FakeEngine) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        api.messages.create(model="fake", max_tokens=100, messages=image)
    assert caught.value.type == "invalid_request_error"
    assert "'image'" in str(caught.value.api_message)
    with pytest.raises(anthropic.NotFoundError) as missing:
        api.messages.create(model="other", max_tokens=100, messages=HELLO)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="context"):
        api.messages.create(model="fake", max_tokens=100, messages=[{"role": "user", "content": "x" * 2000}])
    engine.fail_after = (2, RequestFailed("not a number"))
    with pytest.raises(anthropic.APIStatusError, match="not a number"):
        list(api.messages.create(model="fake", max_tokens=100, messages=HELLO, stream=True))
    engine.fail_after = (0, RequestFailed("not a number"))
    for streamed in (True, False):
        with pytest.raises(anthropic.InternalServerError) as failed:
            api.messages.create(model="fake", max_tokens=100, messages=HELLO, stream=streamed)
        assert failed.value.type == "api_error"


def test_a_client_that_runs_out_of_patience_aborts_its_request(api: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.delay = 0.2
    with pytest.raises(anthropic.APITimeoutError):
        api.messages.create(model="fake", max_tokens=100, messages=HELLO, timeout=0.3)
    asyncio.run(until(lambda: len(engine.aborted) == 1))


async def test_closing_the_stream_aborts_the_request(url: str, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "x" * 900
    engine.delay = 0.02
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as api:
        async with api.messages.stream(model="fake", max_tokens=900, messages=HELLO) as stream:
            async for _ in stream.text_stream:
                break
        await until(lambda: len(engine.aborted) == 1)


async def test_many_at_once(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as api:
        calls = [
            api.messages.create(model="fake", max_tokens=100, messages=[{"role": "user", "content": str(number)}])
            for number in range(20)
        ]
        answers = await asyncio.gather(*calls)
    texts = [block.text for answer in answers for block in answer.content if block.type == "text"]
    assert texts == [f"<{number}>" for number in range(20)]
