"""LangChain's classes for OpenAI, as in its documentation on servers with an OpenAI-style API."""

import asyncio
import json
import math
from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
STORY = "Tell me a story."
City = Literal["Paris", "Rome", "Vienna"]


class Weather(BaseModel):
    """The weather in a city."""

    city: City
    sunny: bool


def get_weather(city: City) -> str:
    """Tell the weather in a city."""
    return f"It is sunny in {city}."


def chat(url: str, **fields: Any) -> ChatOpenAI:
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 12, "max_retries": 0, **fields}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="unused", **settings)


def completion(url: str, **fields: Any) -> OpenAI:
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 12, "max_retries": 0, **fields}
    return OpenAI(base_url=f"{url}/v1", api_key="unused", **settings)


def embeddings(url: str) -> OpenAIEmbeddings:
    """Without the check of lengths, which would tokenize for OpenAI's own models."""
    return OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="unused", model="smollm2", check_embedding_ctx_length=False, max_retries=0
    )


def joined(chunks: Any) -> AIMessageChunk:
    total, *rest = chunks
    for chunk in rest:
        total += chunk
    return total


def test_a_chat_tells_its_usage_and_why_it_ended(url: str) -> None:
    answer = chat(url).invoke([SystemMessage("You like long stories."), HumanMessage(STORY)])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.usage_metadata["total_tokens"] == answer.usage_metadata["input_tokens"] + 12
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == "smollm2"


def test_a_stream_adds_up_to_the_whole_answer(url: str) -> None:
    whole, streamed = chat(url).invoke(STORY), joined(chat(url, stream_usage=True).stream(STORY))
    assert streamed.content == whole.content
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert streamed.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert streamed.response_metadata["finish_reason"] == "length"


def test_questions_at_once_get_the_answers_of_questions_in_turn(url: str) -> None:
    questions = [f"What is the capital of {country}?" for country in ("Italy", "Austria", "Spain", "Norway")]
    model = chat(url, max_tokens=4)
    at_once = asyncio.run(model.abatch(questions))
    assert [answer.content for answer in at_once] == [model.invoke(question).content for question in questions]


def test_several_choices(url: str) -> None:
    [choices] = chat(url, temperature=1, n=3, seed=1).generate([[HumanMessage(STORY)]]).generations
    assert len({choice.text for choice in choices}) == 3


def test_logprobs_spell_the_answer(url: str) -> None:
    answer = chat(url).bind(logprobs=True, top_logprobs=3).invoke(STORY)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == answer.content
    for token in tokens:
        assert token["logprob"] == max(top["logprob"] for top in token["top_logprobs"])
        assert sum(math.exp(top["logprob"]) for top in token["top_logprobs"]) <= 1 + 1e-6


def test_stop_ends_before_its_string(url: str) -> None:
    whole = chat(url).invoke(QUESTION).content
    word = whole.split()[2]
    stopped = chat(url).invoke(QUESTION, stop=[word])
    assert stopped.content == whole[: whole.index(word)]
    assert stopped.response_metadata["finish_reason"] == "stop"


def test_a_timeout_is_the_clients_own_and_the_server_goes_on(url: str) -> None:
    with pytest.raises(openai.APITimeoutError):
        chat(url, max_tokens=4000, timeout=0.5, extra_body={"ignore_eos": True}).invoke(QUESTION)
    assert chat(url).invoke(QUESTION).content


def test_errors_become_the_clients_exceptions(url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        chat(url, model="nobody").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="top_p") as refused:
        chat(url, top_p=2).invoke(QUESTION)
    assert refused.value.param == "top_p"


def test_a_prompt_too_long_is_a_context_overflow(url: str) -> None:
    with pytest.raises(ContextOverflowError):
        chat(url).invoke("word " * 9000)


def test_a_forced_tool_is_called_with_the_arguments_it_declares(url: str) -> None:
    model = chat(url, max_tokens=60)
    for choice in ("get_weather", "any"):
        [call] = model.bind_tools([get_weather], tool_choice=choice).invoke("Is it sunny in Rome?").tool_calls
        assert (call["name"], call["args"].keys()) == ("get_weather", {"city"})
        assert call["args"]["city"] in City.__args__
        assert call["id"]


def test_a_streamed_tool_call_adds_up(url: str) -> None:
    model = chat(url, max_tokens=60).bind_tools([get_weather], tool_choice="get_weather")
    [whole] = model.invoke("Is it sunny in Rome?").tool_calls
    [streamed] = joined(model.stream("Is it sunny in Rome?")).tool_calls
    assert (streamed["name"], streamed["args"]) == (whole["name"], whole["args"])


def test_offered_tools_may_be_left_alone_and_their_results_are_read(url: str) -> None:
    model = chat(url).bind_tools([get_weather])
    call = {"name": "get_weather", "args": {"city": "Rome"}, "id": "call_1"}
    answer = model.invoke(
        [
            HumanMessage("Is it sunny in Rome?"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("It is sunny in Rome.", tool_call_id="call_1"),
        ]
    )
    assert answer.content or answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(url: str, method: str) -> None:
    model = chat(url, max_tokens=60).with_structured_output(Weather, method=method)
    assert isinstance(model.invoke("It rains in Rome."), Weather)


def test_json_mode_is_json(url: str) -> None:
    model = chat(url, max_tokens=120).bind(response_format={"type": "json_object"})
    answer = model.invoke('Repeat this JSON object and nothing else: {"city": "Rome"}')
    assert isinstance(json.loads(answer.content), dict)


def test_responses_api(url: str) -> None:
    model = chat(url, use_responses_api=True)
    whole, streamed = model.invoke(QUESTION), joined(model.stream(QUESTION))
    assert whole.text == chat(url).invoke(QUESTION).content
    assert streamed.text == whole.text
    assert streamed.usage_metadata == whole.usage_metadata


def test_completions(url: str) -> None:
    whole = completion(url).invoke("Once upon a time")
    assert whole == "".join(completion(url).stream("Once upon a time"))
    prompts = ["Once upon a time", "The capital of France is"]
    result = completion(url).generate(prompts)
    assert [[one.text[:8] for one in choices] for choices in result.generations] == [
        [completion(url).invoke(prompt)[:8]] for prompt in prompts
    ]
    assert result.llm_output["token_usage"]["completion_tokens"] == 24


def test_choices_and_logprobs_of_completions(url: str) -> None:
    sampled = completion(url, temperature=1, n=2, best_of=2, seed=1, logprobs=2)
    [choices] = sampled.generate(["Once upon a time"]).generations
    assert len({choice.text for choice in choices}) == 2
    for choice in choices:
        logprobs = choice.generation_info["logprobs"]
        assert "".join(logprobs["tokens"]) == choice.text
        assert all(len(top) >= 2 for top in logprobs["top_logprobs"])


def test_embeddings(url: str) -> None:
    texts = ["The cat sat on the mat.", "A cat lies on a rug.", "Interest rates rose by half a point."]
    vectors = embeddings(url).embed_documents(texts)
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1, 1, 1], abs=1e-3)
    assert embeddings(url).embed_query(texts[0]) == pytest.approx(vectors[0], abs=0.02)
    near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert near > far
