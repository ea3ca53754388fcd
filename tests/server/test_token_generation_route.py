"""/inference/v1/generate in-process: token ids in, token ids out."""

import json
from typing import Any

import httpx
import pytest

from configs.sampling import StructuredOutput
from tests.server.conftest import MODEL
from tests.server.fake_engine import EOS, FakeEngine, two_beams
from tests.server.test_embeddings_routes import post, refused

PATH = "/inference/v1/generate"
A = [97]
WHOLE = [*b"<a>", EOS]


async def generate(client: httpx.AsyncClient, sampling: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    return await post(client, PATH, token_ids=A, sampling_params=sampling or {}, **body)


async def chunks(client: httpx.AsyncClient, sampling: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    body = {"token_ids": A, "sampling_params": sampling, "stream": True, **body}
    lines = (await client.post(PATH, json=body)).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return [json.loads(one) for one in events[:-1]]


async def test_tokens(client: httpx.AsyncClient) -> None:
    answer = await generate(client, request_id="mine")
    assert (answer["request_id"], answer["model"], answer["output_mode"]) == ("mine", MODEL, "tokens")
    [choice] = answer["choices"]
    assert choice == {"index": 0, "token_ids": WHOLE, "finish_reason": "stop", "logprobs": None}
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1, 4)
    assert "prompt_token_ids" not in answer


async def test_text(client: httpx.AsyncClient) -> None:
    answer = await generate(client, {"stop": ">"}, output_mode="text", return_token_ids=True)
    [choice] = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["stop_reason"]) == ("<a", [*b"<a>"], ">")
    assert answer["prompt_token_ids"] == A


async def test_without_max_tokens_the_context_is_the_limit(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "x" * 2000
    [choice] = (await generate(client))["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (999, "length")
    [choice] = (await generate(client, {"max_tokens": 2}))["choices"]
    assert choice["token_ids"] == [*b"xx"]


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_streams_add_up(client: httpx.AsyncClient, mode: str) -> None:
    sampling = {"n": 2, "logprobs": 1, "prompt_logprobs": 0}
    options = {"include_usage": True}
    whole = await generate(client, sampling, output_mode=mode, return_token_ids=True)
    pieces = await chunks(client, sampling, output_mode=mode, return_token_ids=True, stream_options=options)
    assert [one.get("prompt_token_ids") for one in pieces[:2]] == [A, None]
    assert pieces[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [one for piece in pieces for one in piece["choices"] if one["index"] == choice["index"]]
        assert [token_id for one in own for token_id in one["token_ids"]] == choice["token_ids"]
        assert [entry for one in own for entry in one["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if mode == "text":
            assert "".join(one["text"] for one in own) == choice["text"]


async def test_logprobs_are_by_id(client: httpx.AsyncClient) -> None:
    [choice] = (await generate(client, {"logprobs": 2, "max_tokens": 1}))["choices"]
    [entry] = choice["logprobs"]["content"]
    assert (entry["token_id"], entry["logprob"]) == (ord("<"), -0.5)
    ranked = [(one["token_id"], one["logprob"], one["rank"]) for one in entry["top_logprobs"]]
    assert ranked == [(ord("<"), -0.5, 1), (0x80, -9999.0, 2)]


async def test_every_chunk_can_have_the_usage(client: httpx.AsyncClient) -> None:
    pieces = await chunks(client, {}, stream_options={"continuous_usage_stats": True})
    assert [one["usage"]["completion_tokens"] for one in pieces] == [1, 2, 3, 4]


async def test_what_the_engine_gets(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    sampling = {"temperature": 0.5, "stop_token_ids": [7], "seed": 3, "structured_outputs": {"regex": "a+"}}
    await generate(client, sampling, priority=2, cache_salt="s")
    _, prompt, params, priority, salt = engine.requests[-1]
    assert (prompt, priority, salt) == (A, 2, "s")
    assert (params.temperature, params.stop_token_ids, params.seed) == (0.5, (7,), 3)
    assert params.structured == StructuredOutput("regex", "a+")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": A}, "sampling_params"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [999], "sampling_params": {}}, "token_ids"),
        ({"token_ids": A, "sampling_params": {"nonsense": 1}}, "sampling_params"),
        ({"token_ids": A, "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"token_ids": A, "sampling_params": {"stop": "a", "detokenize": False}}, "sampling_params"),
        ({"token_ids": A, "sampling_params": {"stop_token_ids": [999]}}, "stop_token_ids"),
        ({"token_ids": A, "sampling_params": {}, "features": {}}, "features"),
        ({"token_ids": A, "sampling_params": {}, "stream_options": {}}, "stream_options"),
        ({"token_ids": A, "sampling_params": {}, "output_mode": "audio"}, "output_mode"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    assert (await refused(client, PATH, **body))["param"] == param


async def test_beams(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.logprobs = two_beams  # type: ignore[method-assign]
    sampling = {"use_beam_search": True, "n": 2, "max_tokens": 3, "length_penalty": 0.5}
    answer = (await client.post(PATH, json={"token_ids": A, "sampling_params": sampling})).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*b"lon"], [*b"s", EOS]]
    for wrong in ({"length_penalty": 2}, {**sampling, "length_penalty": 99}):
        refused = await client.post(PATH, json={"token_ids": A, "sampling_params": wrong})
        assert "length_penalty" in refused.json()["error"]["message"]
