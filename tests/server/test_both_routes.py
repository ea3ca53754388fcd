"""What holds for /v1/completions and for /v1/chat/completions alike, in-process."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.fake_engine import FakeEngine

ROUTES = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
}
BOTH = pytest.mark.parametrize("path", ROUTES)
STREAMED = pytest.mark.parametrize("streamed", [False, True])


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(path, json={**ROUTES[path], **fields})


async def stream(client: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = await post(client, path, stream=True, **fields)
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def refusal(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    response = await post(client, path, **fields)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    assert (await post(client, path)).status_code == 200, "the server goes on"
    return dict(response.json()["error"])


@BOTH
@pytest.mark.parametrize("n", [1, 3])
async def test_usage_is_the_last_chunk_and_no_other(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, n: int
) -> None:
    engine.script = lambda prompt, params: "x" * (params.seed or 0)
    engine.num_cached_tokens = 2
    whole = (await post(client, path, n=n, seed=3)).json()
    chunks = await stream(client, path, n=n, seed=3, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(4 + index for index in range(n))
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])


@BOTH
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_no_usage_in_streams_that_did_not_ask(client: httpx.AsyncClient, path: str, options: Any) -> None:
    assert all("usage" not in chunk for chunk in await stream(client, path, stream_options=options))


@BOTH
@pytest.mark.parametrize("n", [1, 3])
async def test_every_choice_has_one_reason_and_it_comes_last(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, n: int
) -> None:
    engine.script = lambda prompt, params: "x" * (9 - 2 * (params.seed or 0))
    choices = [chunk["choices"][0] for chunk in await stream(client, path, n=n, seed=1, max_tokens=5)]
    assert {choice["index"] for choice in choices} == set(range(n))
    for index in range(n):
        reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] == ("length" if 9 - 2 * (1 + index) >= 5 else "stop")


@BOTH
@STREAMED
async def test_a_cut_answer_says_so(client: httpx.AsyncClient, path: str, streamed: bool) -> None:
    if streamed:
        chunks = await stream(client, path, max_tokens=2, stream_options={"include_usage": True})
        answer, reason = chunks[-1], chunks[-2]["choices"][0]["finish_reason"]
        kind = {chunk["object"] for chunk in chunks}
    else:
        answer = (await post(client, path, max_tokens=2)).json()
        reason, kind = answer["choices"][0]["finish_reason"], {answer["object"]}
    assert reason == "length"
    assert kind == {"text_completion" if "chat" not in path else f"chat.completion{'.chunk' * streamed}"}
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 2


@BOTH
@STREAMED
@pytest.mark.parametrize("model", ["no-such", " "])
async def test_only_the_served_model_answers(client: httpx.AsyncClient, path: str, streamed: bool, model: str) -> None:
    response = await post(client, path, model=model, stream=streamed)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'fake'" in error["message"]


@BOTH
@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}, {"model": "fake"}])
async def test_answers_name_the_served_model(client: httpx.AsyncClient, path: str, given: dict[str, Any]) -> None:
    assert (await post(client, path, **given)).json()["model"] == "fake"
    assert {chunk["model"] for chunk in await stream(client, path, **given)} == {"fake"}


@BOTH
@STREAMED
async def test_what_load_generators_send_is_answered(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, streamed: bool
) -> None:
    """Both limits, nulls, vLLM's extensions, and a field of their own."""
    fields = {
        "max_tokens": 4,
        "max_completion_tokens": 4,
        "stop": None,
        "ignore_eos": True,
        "temperature": 0.0,
        "seed": None,
        "logprobs": None,
        "repetition_penalty": 1.0,
        "load_generator_id": "x",
        "stream": streamed,
        **({"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if streamed else {}),
    }
    response = await post(client, path, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-octavo-ignored-fields"] == "load_generator_id"
    params = engine.requests[0][2]
    assert (params.max_tokens, params.ignore_eos, params.stop, params.seed) == (4, True, (), None)


@BOTH
@STREAMED
@pytest.mark.parametrize("num_tokens", [32_000, 10_000_000, 2**63])
async def test_a_limit_beyond_the_context_is_refused_with_its_size(
    client: httpx.AsyncClient, path: str, streamed: bool, num_tokens: int
) -> None:
    error = await refusal(client, path, max_tokens=num_tokens, stream=streamed)
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert "1000" in error["message"]


@BOTH
@pytest.mark.parametrize("bias", [{"99999999": 5}, {"-1": 5}, {"abc": 5}, {"5": 1e9}, {"5": None}, [5], "5"])
async def test_biases_without_a_meaning_are_refused(client: httpx.AsyncClient, path: str, bias: Any) -> None:
    assert (await refusal(client, path, logit_bias=bias))["param"] == "logit_bias"


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": 100_000}, "n"),
        ({"stop": ["x"] * 5000}, "stop"),
        ({"stop": "x" * 10_000_000}, "stop"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
    ],
)
@STREAMED
async def test_values_beyond_the_limits_are_refused(
    engine: FakeEngine, path: str, fields: dict[str, Any], param: str, streamed: bool
) -> None:
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(), "fake"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await refusal(client, path, **fields, stream=streamed))["param"] == param
    assert len(engine.requests) == 1, "only the one that shows that the server goes on"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", '{"prompt": "a\\ud800b"}'),
        ("/v1/completions", '{"prompt": "a", "stop": "\\udfff"}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a\\ud800b"}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udc00"}]}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "stop": ["\\ud800"]}'),
    ],
)
async def test_half_a_surrogate_pair_is_no_text(client: httpx.AsyncClient, path: str, body: str) -> None:
    response = await client.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_choices_can_be_rebuilt_from_a_stream_by_their_index(url: str, engine: FakeEngine) -> None:
    """By OpenAI's client: text, logprobs and one role for each of several choices."""
    engine.script = lambda prompt, params: "abcdefgh"[: params.seed]
    fields: dict[str, Any] = {"model": "fake", "n": 3, "seed": 2, "logprobs": True, "top_logprobs": 1}
    messages: Any = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        whole = api.chat.completions.create(messages=messages, **fields)
        chunks = list(api.chat.completions.create(messages=messages, stream=True, **fields))
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert [one.delta.role for one in mine if one.delta.role] == ["assistant"]
        positions = [entry for one in mine if one.logprobs for entry in one.logprobs.content or []]
        assert choice.logprobs
        assert positions == choice.logprobs.content
        assert "".join(entry.token for entry in positions).removesuffix("<end>") == choice.message.content


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_may_be_used_again_as_soon_as_its_answer_has_ended(path: str, stream: bool) -> None:
    """The client sends the next request before the server has put the first one away."""
    app = create_app(FakeEngine(), ServerConfig(), "fake")
    transport = httpx.ASGITransport(app)
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "request_id": "mine", "stream": stream}
    later: list[asyncio.Task[httpx.Response]] = []

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as other:
            return await other.post(path, json=body)

    async def again_at_the_end(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_ask(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                later.append(asyncio.create_task(ask()))
                await asyncio.shield(later[0])

        await app(scope, receive, send_and_ask)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(again_at_the_end), base_url="http://test") as http:
        assert (await http.post(path, json=body)).status_code == 200
    assert [(await one).status_code for one in later] == [200]
