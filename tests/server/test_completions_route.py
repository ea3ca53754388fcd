"""/v1/completions in-process."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from configs.errors import RequestFailed
from engine.messages import TokenLogprobs
from tests.server.fake_engine import BOS, EOS, FakeEngine

PATH = "/v1/completions"


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"prompt": "ab", **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(PATH, json={"prompt": "ab", "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in events[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in events[:-2]]


async def refused(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"prompt": "ab", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


async def test_shape_of_a_whole_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 2
    answer = await complete(client)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_600_000_000
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "<ab>", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_stream_joins_to_the_whole_answer(client: httpx.AsyncClient) -> None:
    whole = await complete(client, logprobs=1)
    chunks = await stream(client, logprobs=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert all("usage" not in chunk and chunk["object"] == "text_completion" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name, values in whole["choices"][0]["logprobs"].items():
        assert [value for chunk in logprobs for value in chunk[name]] == values


async def test_logprobs(client: httpx.AsyncClient) -> None:
    logprobs = (await complete(client, logprobs=2, max_tokens=2))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["<", "a"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"<": -0.5, "bytes:\\x80": -9999.0}, {"a": -0.5, "bytes:\\x80": -9999.0}],
        "text_offset": [0, 1],
    }
    assert (await complete(client, logprobs=0))["choices"][0]["logprobs"]["top_logprobs"][0] == {"<": -0.5}


@pytest.mark.parametrize(
    ("chosen", "top", "expected"),
    [
        (0xE2, [0x80, 0xE2, 0x99], {"bytes:\\x80": -1.0, "bytes:\\xe2": -2.0, "bytes:\\x99": -3.0}),
        (65, [66, 65], {"B": -1.0, "A": -2.0}),
        (65, [66], {"B": -1.0, "A": -9.0}),
        (300, [65, 300], {"token_id:65": -1.0, "A": -2.0}),  # one text, two ids
        (65, [300, 66], {"token_id:300": -1.0, "B": -2.0, "A": -9.0}),
        (66, [300, 65], {"A": -1.0, "token_id:65": -2.0, "B": -9.0}),
        (301, [302, 301, EOS], {"token_id:302": -1.0, "": -2.0, "<end>": -3.0}),  # no text at all
        (66, [0xE2, 303, 66], {"bytes:\\xe2": -1.0, "token_id:303": -2.0, "B": -3.0}),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_tokens_that_share_a_text_are_told_apart(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    chosen: int,
    top: list[int],
    expected: dict[str, float],
    streamed: bool,
) -> None:
    texts = {300: b"A", 301: b"", 302: b"", 303: b"\xe2"}
    plain = engine.tokenizer.token_bytes
    monkeypatch.setattr(engine.tokenizer, "token_bytes", lambda one: texts[one] if one in texts else plain(one))
    pairs = [(token_id, -float(place)) for place, token_id in enumerate(top, start=1)]
    position = TokenLogprobs(chosen, dict(pairs).get(chosen, -9.0), pairs)
    monkeypatch.setattr(engine, "logprobs", lambda request: [position])
    fields = {"logprobs": len(top), "max_tokens": 2}
    if streamed:
        found = [chunk["choices"][0]["logprobs"] for chunk in await stream(client, **fields)][:2]
        logprobs = {name: found[0][name] + found[1][name] for name in found[0]}
    else:
        logprobs = (await complete(client, **fields))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [expected] * 2
    assert len(expected) == len({chosen, *top})
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, one in zip(*columns, strict=True):
        assert one[token] == logprob == position.logprob


async def test_offsets_count_the_characters_that_are_complete(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter([*"aé€b".encode(), 99])
    monkeypatch.setattr(engine, "logprobs", lambda request: [TokenLogprobs(next(ids), -1.0, [])])
    engine.script = lambda prompt, params: "x" * 7
    logprobs = (await complete(client, prompt=[0xC3, 0xA9, 97], echo=True, logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["tokens"][:5] == ["bytes:\\xc3", "bytes:\\xa9", "a", "a", "bytes:\\xc3"]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 3, 4, 4, 4, 5, 6]


@pytest.mark.parametrize("prompts", [["a", "bc", "def", ""], [[97], [98, 99], [100, 101, 102], [BOS]]])
async def test_several_prompts_with_several_choices(
    client: httpx.AsyncClient, engine: FakeEngine, prompts: list[Any]
) -> None:
    engine.script = lambda prompt, params: f"{prompt}{params.seed}"
    answer = await complete(client, prompt=prompts, n=2, seed=7)
    expected = ["a7", "a8", "bc7", "bc8", "def7", "def8", "7", "8"]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    num_prompt = sum(len(request[1]) for request in engine.requests) // 2
    assert answer["usage"]["prompt_tokens"] == num_prompt
    chunks = await stream(client, prompt=prompts, n=2, seed=7, stream_options={"include_usage": True})
    texts = [""] * 8
    finished = []
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        choice = chunk["choices"][0]
        assert choice["index"] not in finished
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert texts == expected
    assert sorted(finished) == list(range(8))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer["usage"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_chunk_unless_asked_for(client: httpx.AsyncClient, options: Any) -> None:
    assert all("usage" not in chunk for chunk in await stream(client, stream_options=options))


async def test_continuous_usage(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk["usage"]["completion_tokens"] for chunk in await stream(client, stream_options=options)]
    assert counts == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("num_tokens", [1, 3])
async def test_max_tokens(client: httpx.AsyncClient, num_tokens: int) -> None:
    answer = await complete(client, max_tokens=num_tokens)
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    both = await complete(client, max_tokens=4, max_completion_tokens=num_tokens)
    assert both["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
async def test_sixteen_tokens_by_default(client: httpx.AsyncClient, engine: FakeEngine, fields: Any) -> None:
    engine.script = lambda prompt, params: "x" * 600
    assert (await complete(client, **fields))["usage"]["completion_tokens"] == 16


async def test_default_is_clamped_to_the_context(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: "x" * 600
    assert (await complete(client, prompt=[97] * 995))["usage"]["completion_tokens"] == 5
    error = await refused(client, prompt=[97] * 1000)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("num_tokens", [998, 10_000_000, 2**63])
@pytest.mark.parametrize("streamed", [True, False])
async def test_explicit_max_tokens_must_fit(client: httpx.AsyncClient, num_tokens: int, streamed: bool) -> None:
    error = await refused(client, max_tokens=num_tokens, stream=streamed)
    assert error["code"] == "context_length_exceeded"
    assert "1000" in error["message"]
    assert str(num_tokens + 3) in error["message"]


async def test_empty_prompts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, prompt="")
    await complete(client, prompt=[""])
    assert engine.requests[0][1] == engine.requests[1][1] == [BOS]
    engine.tokenizer.bos_token_id = None
    for prompt in ("", [""], [], [[]], [[97], []]):
        assert (await refused(client, prompt=prompt))["param"] == "prompt"
    await complete(client)


@pytest.mark.parametrize("prompt", [[258], [263, 1], [-1], [1.5], [True], ["a", 1], {}, None, 5, [[1], "a"], [None]])
async def test_bad_prompts_are_refused(client: httpx.AsyncClient, prompt: Any) -> None:
    assert (await refused(client, prompt=prompt))["param"] == "prompt"


async def test_every_sampling_field_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 2.0},
        "bad_token_ids": [9],
        "bad_words": ["bad"],
        "allowed_token_ids": [97, 98],
        "logprob_token_ids": [99],
        "seed": 2**64 - 1,
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 3,
        "max_tokens": 5,
    }
    await complete(client, **fields, stop="zz", priority=-3, cache_salt="s", user="u", n=1)
    _, _, params, priority, salt = engine.requests[0]
    sent = json.loads(msgspec.json.encode(params))
    assert {name: sent[name] for name in fields} == fields
    assert (params.stop, priority, salt) == (("zz",), -3, "s")


async def test_defaults_of_the_checkpoint_give_way_to_the_request(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.default_sampling = {"temperature": 0.2, "top_k": 20}
    await complete(client, top_k=3, temperature=None)
    await complete(client, temperature=1.0)
    first, second = (request[2] for request in engine.requests)
    assert (first.temperature, first.top_k) == (0.2, 3)
    assert (second.temperature, second.top_k) == (1.0, 20)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 2**70}, "top_k"),
        ({"logprobs": 25}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"n": 2.5}, "n"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop": ["x"] * 257}, "stop"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logits_processors": ["x"]}, "logits_processors"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_refusals_name_the_field(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, streamed: bool
) -> None:
    error = await refused(client, **{"stream": streamed, **fields} if "stream_options" not in fields else fields)
    assert error["param"] == param
    assert await complete(client)


async def test_null_and_neutral_fields_are_accepted(client: httpx.AsyncClient) -> None:
    neutral = {"echo": False, "suffix": None, "best_of": 2, "n": 2, "response_format": {"type": "text"}}
    unset = dict.fromkeys(("stop", "seed", "logit_bias", "logprobs", "stream", "stream_options", "user", "temperature"))
    response = await client.post(PATH, json={"prompt": "ab", "model": "fake", **neutral, **unset})
    assert response.status_code == 200, response.text
    assert "x-octavo-ignored-fields" not in response.headers


async def test_unknown_fields_are_named_in_a_header(client: httpx.AsyncClient) -> None:
    fields = {"prompt": "ab", "foo": 1, "böse\r\nx: y": 2}
    for streamed in (False, True):
        response = await client.post(PATH, json={**fields, "stream": streamed})
        assert response.status_code == 200
        assert response.headers["x-octavo-ignored-fields"] == "foo, b\\xf6se??x: y"


@pytest.mark.parametrize("model", ["no-such", "no-such:latest"])
async def test_unknown_models(client: httpx.AsyncClient, model: str) -> None:
    response = await client.post(PATH, json={"prompt": "ab", "model": model})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "fake" in error["message"]


async def test_stop_string_is_reported(client: httpx.AsyncClient) -> None:
    choice = (await complete(client, stop=["b"]))["choices"][0]
    assert choice == {
        "index": 0, "text": "<a", "logprobs": None, "finish_reason": "stop", "stop_reason": "b"
    }  # fmt: skip
    assert (await stream(client, stop=["b"]))[-1]["choices"][0]["stop_reason"] == "b"


@pytest.mark.parametrize("n", [1, 3])
async def test_failure_before_the_first_token_has_a_status(
    client: httpx.AsyncClient, engine: FakeEngine, n: int
) -> None:
    engine.fail_after = (0, RequestFailed("not a number"))
    for streamed in (False, True):
        response = await client.post(PATH, json={"prompt": "ab", "stream": streamed, "n": n})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "not a number"


@pytest.mark.parametrize("n", [1, 3])
async def test_failure_in_a_stream_is_its_last_event(client: httpx.AsyncClient, engine: FakeEngine, n: int) -> None:
    engine.fail_after = (2, RequestFailed("not a number"))
    response = await client.post(PATH, json={"prompt": "ab", "stream": True, "n": n})
    events = response.text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["message"] == "not a number"
    assert all("choices" in line for line in events[:-2])
    assert len(engine.aborted) == n


async def test_faults_of_ours_are_told_without_detail(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = (0, KeyError("secret"))
    response = await client.post(PATH, json={"prompt": "ab"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
