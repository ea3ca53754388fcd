"""LiteLLM with both of its providers for such servers: any OpenAI-style one, and vLLM."""

import asyncio
import json
import math
from typing import Any

import litellm
import pytest

litellm.suppress_debug_info = True
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story."}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Vienna"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TEXT_PROVIDERS = {"openai": "text-completion-openai", "hosted_vllm": "hosted_vllm"}

pytestmark = pytest.mark.parametrize("provider", TEXT_PROVIDERS)


def where(url: str) -> dict[str, Any]:
    return {"api_base": f"{url}/v1", "api_key": "unused", "max_retries": 0}


def chat(url: str, provider: str, messages: Any = QUESTION, **fields: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 12, **where(url), **fields}
    return litellm.completion(f"{provider}/{settings.pop('model', 'smollm2')}", messages, **settings)


def text(url: str, provider: str, **fields: Any) -> Any:
    settings = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, **where(url), **fields}
    return litellm.text_completion(model=f"{TEXT_PROVIDERS[provider]}/smollm2", **settings)


def test_a_stream_adds_up_to_the_whole_answer(url: str, provider: str) -> None:
    whole = chat(url, provider, STORY)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    chunks = list(chat(url, provider, STORY, stream=True, stream_options={"include_usage": True}))
    streamed = litellm.stream_chunk_builder(chunks)
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_choices_logprobs_and_stop(url: str, provider: str) -> None:
    answer = chat(url, provider, STORY, n=2, temperature=1, seed=1, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    whole = chat(url, provider).choices[0].message.content
    word = whole.split()[2]
    stopped = chat(url, provider, stop=[word]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (whole[: whole.index(word)], "stop")


def test_calls_at_once(url: str, provider: str) -> None:
    async def at_once() -> list[str]:
        model = f"{provider}/smollm2"
        calls = [litellm.acompletion(model, QUESTION, temperature=0, max_tokens=6, **where(url)) for _ in range(8)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert set(asyncio.run(at_once())) == {chat(url, provider, max_tokens=6).choices[0].message.content}


def test_errors_become_the_clients_exceptions(url: str, provider: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        chat(url, provider, model="nobody")
    with pytest.raises(litellm.BadRequestError, match="max_tokens"):
        chat(url, provider, max_tokens=-1)
    with pytest.raises(litellm.Timeout):
        chat(url, provider, max_tokens=4000, timeout=0.5, extra_body={"ignore_eos": True})


def test_a_prompt_too_long_exceeds_the_context_window(url: str, provider: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        chat(url, provider, [{"role": "user", "content": "word " * 9000}])


def test_a_forced_tool_is_called_whole_and_streamed(url: str, provider: str) -> None:
    forced = {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 60,
    }
    [call] = chat(url, provider, **forced).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in CITY["properties"]["city"]["enum"]
    streamed = litellm.stream_chunk_builder(list(chat(url, provider, stream=True, **forced)))
    [again] = streamed.choices[0].message.tool_calls
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)


def test_structured_output_follows_its_schema(url: str, provider: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = json.loads(chat(url, provider, response_format=schema, max_tokens=60).choices[0].message.content)
    assert answer["city"] in CITY["properties"]["city"]["enum"]


def test_text_completions(url: str, provider: str) -> None:
    whole = text(url, provider, logprobs=2)
    assert "".join(whole.choices[0].logprobs.tokens) == whole.choices[0].text
    assert "".join(chunk.choices[0].text or "" for chunk in text(url, provider, stream=True)) == whole.choices[0].text
    several = text(url, provider, prompt=["Once upon a time", "The capital of France is"], max_tokens=4)
    assert len(several.choices) == 2
    assert whole.choices[0].text.startswith(several.choices[0].text)


def test_embeddings(url: str, provider: str) -> None:
    texts = ["The cat sat on the mat.", "Interest rates rose by half a point."]
    answer = litellm.embedding(f"{provider}/smollm2", texts, **where(url))
    assert [math.hypot(*one["embedding"]) for one in answer.data] == pytest.approx([1, 1], abs=1e-3)
    assert answer.usage.prompt_tokens > 0


def test_the_served_models_are_found(url: str, provider: str) -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider=provider, api_key="unused", api_base=f"{url}/v1"
    )
    assert [name.split("/")[-1] for name in found] == ["smollm2"]
