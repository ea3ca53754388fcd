"""Programs that take Octavo for Ollama: its own client, LiteLLM (which says no JSON is JSON), LangChain."""

import asyncio
import math
from typing import Any, Literal

import litellm
import ollama
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel

litellm.suppress_debug_info = True
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
OF_OLLAMA = {"num_ctx": 131072, "repeat_last_n": 64, "repeat_penalty": 1.1, "top_k": 40, "mirostat": 0}
"""Options as people set them for all of their models."""


class Weather(BaseModel):
    city: Literal["Paris", "Rome", "Vienna"]


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
HISTORY: Any = [
    *QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


def lengths(vectors: Any) -> Any:
    return [pytest.approx(math.hypot(*vector), abs=1e-3) for vector in vectors]


def test_ollamas_own_client(url: str) -> None:
    api, options = ollama.Client(url), {"temperature": 0, "num_predict": 12}
    whole = api.chat("smollm2", QUESTION, options={**OF_OLLAMA, **options})
    parts = api.chat("smollm2:latest", QUESTION, options={**OF_OLLAMA, **options}, stream=True)
    assert "Paris" in whole.message.content
    assert "".join(part.message.content for part in parts) == whole.message.content
    generated = api.generate("smollm2", "Once upon a time", raw=True, options=options)
    assert generated.eval_count == 12
    assert lengths(api.embed("smollm2", ["a cat", "a dog"]).embeddings) == [1, 1]
    assert api.show("smollm2").details.quantization_level == "Q4_1"
    story = [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "Yes."}] * 20
    assert api.chat("smollm2", [*story, *QUESTION], options={"num_predict": 3}).prompt_eval_count < 8192
    with pytest.raises(ollama.ResponseError, match="the model 'nobody' does not exist"):
        api.chat("nobody", QUESTION)


@pytest.mark.parametrize("provider", ["ollama_chat", "ollama"])
def test_litellm(url: str, provider: str) -> None:
    async def chat(messages: Any = QUESTION, **fields: Any) -> Any:
        settings = {"api_base": url, "max_tokens": 12, "temperature": 0, **OF_OLLAMA, **fields}
        return await litellm.acompletion(f"{provider}/{settings.pop('model', 'smollm2')}", messages, **settings)

    async def all_of_it() -> None:
        whole = (await chat()).choices[0].message.content
        assert "Paris" in whole
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in await chat(stream=True)]) == whole
        schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": Weather.model_json_schema()}}
        Weather.model_validate_json((await chat(response_format=schema)).choices[0].message.content)
        assert (await chat(HISTORY, tools=[TOOL])).choices[0].message
        with pytest.raises(litellm.NotFoundError, match="the model 'nobody' does not exist"):
            await chat(model="nobody")
        embedded = await litellm.aembedding("ollama/smollm2", ["a cat", "a dog"], api_base=url)
        assert lengths(one["embedding"] for one in embedded.data) == [1, 1]

    asyncio.run(all_of_it())


def test_langchain(url: str) -> None:
    here: Any = {"base_url": url, "model": "smollm2"}
    model = ChatOllama(**here, **OF_OLLAMA, temperature=0, num_predict=12, validate_model_on_init=True)
    whole = model.invoke("What is the capital of France?")
    assert "Paris" in whole.content
    assert "".join(part.content for part in model.stream("What is the capital of France?")) == whole.content
    call: Any = {"name": "get_weather", "args": {"city": "Rome"}, "id": "1"}
    history = [HumanMessage("Sunny?"), AIMessage("", tool_calls=[call]), ToolMessage("sunny", tool_call_id="1")]
    assert model.bind_tools([TOOL]).invoke(history)
    structured = ChatOllama(**here, temperature=0, num_predict=40).with_structured_output(Weather)
    assert isinstance(structured.invoke("It rains in Rome."), Weather)
    assert OllamaLLM(**here, num_predict=8).invoke("Once upon a time")
    vectors = OllamaEmbeddings(**here, num_ctx=4096).embed_documents(["a cat", "a dog"])
    assert lengths(vectors) == [1, 1]
    with pytest.raises(ollama.ResponseError, match="the model 'nobody' does not exist"):
        ChatOllama(base_url=url, model="nobody").invoke("x")
