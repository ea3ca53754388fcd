"""Answers, and all that is streamed, by the strict types of the protocols' own Python packages; where those let nearly
everything be null, by a list of what the protocols' owners send as null."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import anthropic.types as anthropic_types
import httpx
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.server.fake_engine import FakeEngine

TEMPLATE = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call></think>"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXTS = ["hello", f"<think>\nhm\n</think>\n\nLook: {CALL}", f"{CALL}{CALL}", "<think>\nhm", ""]
HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
SPACE = {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **FUNCTION}]}
NAMED = {"tools": [{"type": "function", **FUNCTION}, SPACE]}
MINE = {"max_tokens": 99, "tools": [{"name": "f", "input_schema": SCHEMA}]}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/chat/completions", {"messages": HELLO, **TOOLS, "n": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "functions": [FUNCTION]}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "logprobs": 2, "max_tokens": 3, "stop": ["z"]}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": "hi", **NAMED, "metadata": {"a": "b"}, "tool_choice": "auto"}),
    ("/v1/responses", {"input": "hi", **LOGPROBS, "max_output_tokens": 3, "reasoning": {"effort": "low"}}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 99}),
    ("/v1/messages", {"messages": HELLO, **MINE, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 3, "stop_sequences": ["l"]}),
]
WHOLE: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
    "/v1/messages": anthropic_types.Message,
}
PIECES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": Completion,
    "/v1/responses": ResponseStreamEvent,
    "/v1/messages": anthropic_types.RawMessageStreamEvent,
}
OF_RESPONSE = (
    *("completed_at", "error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "reasoning.effort", "reasoning.summary", "safety_identifier"),
    *("usage", "user"),
)
NULL = {
    "/v1/chat/completions": {
        *("choices.message.content", "choices.message.refusal", "choices.logprobs", "choices.logprobs.refusal"),
        *("choices.finish_reason", "usage"),
    },
    "/v1/completions": {"choices.logprobs", "choices.finish_reason", "usage"},
    "/v1/responses": {*OF_RESPONSE, *(f"response.{name}" for name in OF_RESPONSE)},
    "/v1/messages": {"stop_sequence", "message.stop_sequence", "message.stop_reason", "delta.stop_sequence"},
}
"""What OpenAI and Anthropic send as null rather than leave out."""


def nulls(value: Any, path: str = "") -> Iterator[str]:
    if value is None:
        yield path[1:]
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from nulls(inner, f"{path}.{name}")
    for inner in value if isinstance(value, list) else ():
        yield from nulls(inner, path)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check(data: str, kind: Any, path: str) -> None:
    if kind is Completion:  # the package has one type for the answer and its pieces, which have no reason yet
        adapter(kind).validate_json(data.replace('"finish_reason":null', '"finish_reason":"stop"'), strict=True)
    else:
        adapter(kind).validate_json(data, strict=True)
    assert set(nulls(json.loads(data))) <= NULL[path], data


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_answers_and_events_have_their_packages_types(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], text: str
) -> None:
    engine.chat_template = TEMPLATE
    engine.script = lambda prompt, params: text
    response = await client.post(path, json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    check(response.text, WHOLE[path], path)
    with_usage = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    streamed = (await client.post(path, json={"model": "fake", **body, "stream": True, **with_usage})).text
    events = [line.removeprefix("data: ") for line in streamed.split("\n") if line.startswith("data: {")]
    assert len(events) > 1
    for data in events:
        check(data, PIECES[path], path)


async def test_other_answers_have_their_packages_types(client: httpx.AsyncClient) -> None:
    embeddings = await client.post("/v1/embeddings", json={"model": "fake", "input": ["hi", "ho"]})
    CreateEmbeddingResponse.model_validate_json(embeddings.text, strict=True)
    assert not list(nulls(embeddings.json()))
    models = (await client.get("/v1/models")).json()
    assert not list(nulls(models))
    for model in models["data"]:
        Model.model_validate_json(json.dumps(model), strict=True)
        anthropic_types.ModelInfo.model_validate_json(json.dumps(model), strict=True)
    counted = await client.post("/v1/messages/count_tokens", json={"model": "fake", "messages": HELLO})
    anthropic_types.MessageTokensCount.model_validate_json(counted.text, strict=True)
