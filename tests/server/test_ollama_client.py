"""The real Ollama client against a real port, with a scripted engine."""

import asyncio
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from configs.errors import RequestFailed
from tests.server.fake_engine import FakeEngine
from tests.server.test_ollama_routes import CALL, HELLO, TEMPLATE


@pytest.fixture
def api(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


def get_weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"rain in {city}"


def test_chat(api: ollama.Client) -> None:
    whole = api.chat("fake", HELLO, options=ollama.Options(num_ctx=131072, top_k=40, repeat_last_n=64, stop=["zz"]))
    assert (whole.message.content, whole.done_reason, whole.eval_count) == ("<hi>", "stop", 5)
    parts = list(api.chat("fake:latest", HELLO, stream=True, keep_alive="5m"))
    assert "".join(part.message.content or "" for part in parts) == "<hi>"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate(api: ollama.Client, engine: FakeEngine) -> None:
    whole = api.generate("fake", "hi", system="be brief")
    again = api.generate("fake", "ho", context=whole.context)
    assert (whole.response, engine.requests[1][1][: len(whole.context or ())]) == ("<be brief|hi>", whole.context)
    assert again.prompt_eval_count == len(engine.requests[1][1])
    assert "".join(part.response for part in api.generate("fake", "hi", stream=True)) == "<hi>"
    assert api.generate("fake", "a", suffix="b").response
    assert api.generate("fake", "").done_reason == "load"


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b\u2029", "\r\n\x0b\x0c\x1c\x1d\x1e"])
def test_odd_line_breaks_cut_no_line(api: ollama.Client, engine: FakeEngine, text: str) -> None:
    engine.script = lambda prompt, params: text
    parts = list(api.chat("fake", HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == text


def test_tools_and_thinking(api: ollama.Client, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    engine.script = lambda prompt, params: "<think>\nhm\n</think>\n\n" + CALL.replace("weather", "get_weather")
    message = api.chat("fake", HELLO, tools=[get_weather], think=True).message
    assert message.thinking == "hm"
    [call] = message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    history = [*HELLO, message, {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
    api.chat("fake", history, tools=[get_weather])
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert [call["function"] for call in engine.messages[1]["tool_calls"]] == [function]
    assert engine.messages[2] == {"role": "tool", "content": "rain", "name": "get_weather"}
    streamed = list(api.chat("fake", HELLO, tools=[get_weather], stream=True))
    assert [call.function.name for part in streamed for call in part.message.tool_calls or []] == ["get_weather"]


def test_a_format_is_a_schema(api: ollama.Client, engine: FakeEngine) -> None:
    api.chat("fake", HELLO, format={"type": "object"})
    api.generate("fake", "hi", format="json")
    kinds = [request[2].structured and request[2].structured.kind for request in engine.requests]
    assert kinds == ["json_schema", "json_object"]


def test_embeddings(api: ollama.Client) -> None:
    two = api.embed("fake", ["hi", "h"], truncate=True, dimensions=3)
    assert [len(vector) for vector in two.embeddings] == [3, 3]
    assert two.prompt_eval_count == 5
    assert len(api.embed("fake", "hi").embeddings) == 1
    assert list(api.embeddings("fake", "hi").embedding) == [105, 1, 2, 3]


def test_the_model(api: ollama.Client) -> None:
    [found] = api.list().models
    assert (found.model, found.details and found.details.format) == ("fake", "gguf")
    assert api.show("fake").capabilities
    assert [one.model for one in api.ps().models] == ["fake"]
    assert api.pull("fake").status == "success"
    assert [one.status for one in api.pull("fake", stream=True)] == ["success"]


def refused(call: Any, *arguments: Any, **fields: Any) -> ollama.ResponseError:
    with pytest.raises(ollama.ResponseError) as raised:
        list(call(*arguments, **fields))
    assert isinstance(raised.value.error, str)
    return raised.value


@pytest.mark.parametrize("stream", [True, False])
def test_errors_are_texts(api: ollama.Client, engine: FakeEngine, stream: bool) -> None:
    for call in (lambda name: api.chat(name, HELLO, stream=stream), lambda name: api.pull(name, stream=stream)):
        missing = refused(call, "other")
        assert missing.status_code == 404
        assert "the model 'other' does not exist" in missing.error
    error = refused(api.chat, "fake", HELLO, options={"temperature": -1}, stream=stream)
    assert (error.status_code, "temperature" in error.error) == (400, True)
    assert "/api/copy" in refused(api.copy, "fake", "other").error
    assert "/api/delete" in refused(api.delete, "fake").error
    assert "/api/create" in refused(api.create, "other", from_="fake", stream=stream).error
    engine.fail_after = (2 if stream else 0, RequestFailed("not a number"))
    assert refused(api.chat, "fake", HELLO, stream=stream).error == "not a number"


async def test_async_client(url: str) -> None:
    async with ollama.AsyncClient(url) as api:
        answers = await asyncio.gather(*(api.generate("fake", str(number)) for number in range(20)))
        parts = [part.message.content or "" async for part in await api.chat("fake", HELLO, stream=True)]
    assert [one.response for one in answers] == [f"<{number}>" for number in range(20)]
    assert "".join(parts) == "<hi>"
