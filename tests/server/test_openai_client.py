"""The real OpenAI client against a real port, with a scripted engine."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from configs.errors import RequestFailed
from configs.settings import ServerConfig
from tests.server.conftest import running_server
from tests.server.fake_engine import FakeEngine

HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_chat(api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(model="fake", messages=HELLO, n=2, seed=1)
    assert [choice.message.content for choice in whole.choices] == ["<hi>", "<hi>"]
    assert whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 10)


def test_chat_stream(api: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    with api.chat.completions.create(model="fake", messages=HELLO, stream=True, n=3, stream_options=options) as chunks:
        received = list(chunks)
    texts = ["", "", ""]
    for chunk in received[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["<hi>"] * 3
    assert received[-1].usage
    assert received[-1].usage.completion_tokens == 15


def test_completions(api: openai.OpenAI) -> None:
    whole = api.completions.create(model="fake", prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in whole.choices] == ["<a>", "<b>"]
    streamed = api.completions.create(model="fake", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "<a>"


async def test_async_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        calls = [api.completions.create(model="fake", prompt=str(number)) for number in range(20)]
        answers = await asyncio.gather(*calls)
    assert [one.choices[0].text for one in answers] == [f"<{number}>" for number in range(20)]


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["fake"]
    assert api.models.retrieve("fake").owned_by == "octavo"
    with pytest.raises(openai.NotFoundError) as caught:
        api.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_errors_become_the_clients_exceptions(api: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model="fake", prompt=[97] * 1001)
    assert caught.value.code == "context_length_exceeded"
    engine.fail_after = (2, RequestFailed("not a number"))
    with pytest.raises(openai.APIError, match="not a number"):
        list(api.completions.create(model="fake", prompt="abc", stream=True))
    engine.fail_after = (0, RequestFailed("not a number"))
    with pytest.raises(openai.InternalServerError):
        api.completions.create(model="fake", prompt="abc", stream=True)
    engine.is_dead = True
    with pytest.raises(openai.InternalServerError) as dead:
        api.completions.create(model="fake", prompt="abc")
    assert dead.value.status_code == 503


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}])
def test_chat_answers_pass_strict_validation(url: str, fields: dict[str, Any]) -> None:
    body = {"messages": HELLO, **fields}
    whole = httpx.post(f"{url}/v1/chat/completions", json=body)
    ChatCompletion.model_validate_json(whole.content, strict=True)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for data in events(httpx.post(f"{url}/v1/chat/completions", json={**body, **options})):
        ChatCompletionChunk.model_validate_json(data, strict=True)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 2}])
def test_completions_pass_strict_validation(url: str, fields: dict[str, Any]) -> None:
    body = {"prompt": "ab", **fields}
    Completion.model_validate_json(httpx.post(f"{url}/v1/completions", json=body).content, strict=True)
    for data in events(httpx.post(f"{url}/v1/completions", json={**body, "stream": True})):
        choice = json.loads(data)["choices"][0]
        assert choice["finish_reason"] in (None, "stop", "length")
        # The client's class for chunks is that of whole answers, whose reason is never null.
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate_json(json.dumps({**json.loads(data), "choices": [choice]}), strict=True)


def events(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    pieces = response.text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    return [piece.removeprefix("data: ") for piece in pieces[:-2]]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 4])
async def test_a_client_that_goes_away_aborts_its_choices(url: str, engine: FakeEngine, streamed: bool, n: int) -> None:
    engine.script = lambda prompt, params: "x" * 900
    engine.delay = 0.02
    async with httpx.AsyncClient() as http:
        body = {"prompt": "a", "max_tokens": 900, "n": n, "stream": streamed}
        request = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
        await until(lambda: len(engine.requests) == n)
        await asyncio.sleep(0.1)
        request.cancel()
    await until(lambda: len(engine.aborted) == n)
    assert httpx.get(f"{url}/health").status_code == 200


async def test_a_client_that_never_reads_holds_its_choice_back() -> None:
    engine = FakeEngine(lambda prompt, params: "x" * 10**6, max_model_len=10**7)
    with running_server(engine, ServerConfig()) as url:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port or 0)) as connection:
            body = b'{"prompt": "a", "max_tokens": 1000000, "stream": true}'
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            await until(lambda: engine.num_tokens > 0)
            num_tokens = -1
            while num_tokens < engine.num_tokens:
                num_tokens = engine.num_tokens
                await asyncio.sleep(0.2)
            assert num_tokens < 10**6
            assert not engine.aborted
        await until(lambda: len(engine.aborted) == 1)


def test_a_body_over_the_limit_is_answered_while_it_is_sent(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", content=b" " * (20 << 20), headers={"expect": ""})
    assert response.status_code == 413
    assert httpx.get(f"{url}/health").status_code == 200


def test_raw_stream(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["transfer-encoding"] == "chunked"
