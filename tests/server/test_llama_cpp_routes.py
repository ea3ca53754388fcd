"""llama.cpp's own routes: /completion and /infill, /props and /slots."""

import json
from typing import Any

import httpx
import pytest

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.conftest import MODEL
from tests.server.fake_engine import BOS, FakeEngine


async def complete(client: httpx.AsyncClient, path: str = "/completion", **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post("/completion", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]


async def test_an_answer_has_what_llama_cpps_clients_read(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi", n_predict=20, temperature=-1, return_tokens=True)
    assert (answer["content"], answer["stop"], answer["model"], answer["prompt"]) == ("<hi>", True, "fake", "<begin>hi")
    assert bytes(answer["tokens"][:4]) == b"<hi>"
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == ("eos", "", False)
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (3, len(answer["tokens"]))
    assert answer["generation_settings"]["n_predict"] == 20
    assert answer["generation_settings"]["temperature"] == 0
    timings = answer["timings"]
    assert (timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]) == (3, answer["tokens_predicted"])
    assert timings["prompt_ms"] >= 0


@pytest.mark.parametrize(
    ("fields", "stop_type", "word"),
    [({"n_predict": 2}, "limit", ""), ({"stop": ["i>"]}, "word", "i>"), ({"stop": "i"}, "word", "i"), ({}, "eos", "")],
)
async def test_why_an_answer_ended(client: httpx.AsyncClient, fields: Any, stop_type: str, word: str) -> None:
    answer = await complete(client, prompt="hi", **fields)
    assert (answer["stop_type"], answer["stopping_word"]) == (stop_type, word)
    *_, last = await stream(client, prompt="hi", **fields)
    assert (last["stop_type"], last["stopping_word"]) == (stop_type, word)


async def test_a_stream_joins_to_the_answer(client: httpx.AsyncClient) -> None:
    whole = await complete(client, prompt="h\ni", n_probs=2, return_tokens=True)
    *chunks, last = await stream(client, prompt="h\ni", n_probs=2)
    assert all(chunk["stop"] is False for chunk in chunks)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"]
    assert [one for chunk in chunks for one in chunk["tokens"]] == whole["tokens"]
    found = [one for chunk in chunks for one in chunk["completion_probabilities"]]
    assert found == whole["completion_probabilities"]
    assert {"id", "token", "bytes", "logprob", "top_logprobs"} == set(found[0])
    same = ("tokens_predicted", "tokens_evaluated", "has_new_line", "stop", "model", "generation_settings")
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}
    assert (last["content"], last["has_new_line"]) == ("", True)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[BOS, 104, 105]]),
        ([104, 105], [[104, 105]]),
        ([104, "i", 33], [[104, 105, 33]]),
        (["h", 105], [[BOS, 104, 105]]),
        (["h", "i"], [[BOS, 104], [BOS, 105]]),
        ([[104, "i"], "i", {"prompt_string": "!"}], [[104, 105], [BOS, 105], [BOS, 33]]),
        ({"prompt_string": "hi"}, [[BOS, 104, 105]]),
        ("", [[BOS]]),
    ],
)
async def test_prompts_in_every_form(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, ids: Any) -> None:
    answer = await complete(client, prompt=prompt, n_predict=3)
    assert [request[1] for request in engine.requests] == ids
    assert isinstance(answer, list) is (len(ids) > 1)


@pytest.mark.parametrize("prompt", [[], {}, {"prompt_string": "a", "multimodal_data": ["x"]}, [[]], 5, [1.5]])
async def test_prompts_that_are_none(prompt: Any) -> None:
    app = create_app(FakeEngine(bos_token_id=None), ServerConfig(), MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post("/completion", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    schema = {"type": "object"}
    await complete(
        client,
        prompt="a",
        seed=-1,
        repeat_penalty=1.5,
        top_k=7,
        logit_bias=[[104, 2], ["hi", -1.5], [33, False]],
        json_schema=schema,
        ignore_eos=True,
        n_predict=5,
    )
    params = engine.requests[-1][2]
    assert (params.repetition_penalty, params.top_k, params.seed, params.ignore_eos) == (1.5, 7, None, True)
    assert params.logit_bias == {104: -1.5, 105: -1.5, 33: -100}
    assert params.structured is not None
    assert (params.structured.kind, json.loads(params.structured.source)) == ("json_schema", schema)
    await complete(client, prompt="a", grammar='root ::= "a"', json_schema=None, n_predict=-1)
    params = engine.requests[-1][2]
    assert params.structured is not None
    assert (params.structured.kind, params.structured.source) == ("grammar", 'root ::= "a"')


async def test_a_limit_beyond_the_context_is_the_contexts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, prompt="hi", n_predict=100_000)
    assert engine.requests[-1][2].max_tokens == 997


async def test_a_prefix_that_is_too_long_is_named(client: httpx.AsyncClient) -> None:
    response = await client.post("/infill", json={"input_prefix": "a" * 2000, "input_suffix": "b"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input_prefix"


async def test_samplers_that_there_are_not_are_named(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "n_predict": 2, "samplers": ["infill"], "mirostat": 2, "cache_prompt": True, "id_slot": 0}
    response = await client.post("/completion", json={**body, "repeat_penalty": 1.1, "repeat_last_n": 64})
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "samplers, mirostat, repeat_last_n"


async def test_the_fields_that_a_request_asks_for(client: httpx.AsyncClient) -> None:
    """As llama.vim does."""
    fields = ["content", "timings/prompt_n", "generation_settings/n_ctx", "no/such", "none"]
    answer = await complete(client, prompt="hi", response_fields=fields)
    assert answer == {"content": "<hi>", "timings/prompt_n": 3, "generation_settings/n_ctx": 1000}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": -3}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"grammar": "root ::= x", "json_schema": {}}, "grammar"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"top_p": 2}, "top_p"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"response_fields": ["content"] * 101}, "response_fields"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(client: httpx.AsyncClient, fields: Any, param: str) -> None:
    response = await client.post("/completion", json={"prompt": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"input_prefix": "a", "input_suffix": "b"}])
async def test_the_number_of_answers_is_bounded(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    path = "/completion" if "prompt" in body else "/infill"
    assert len(await complete(client, path, **body, n_cmpl=2)) == 2
    response = await client.post(path, json={**body, "n_cmpl": 2**40})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n_cmpl")


async def test_a_file_that_lacks_its_middle(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, "/infill", input_prefix="a", input_suffix="b", prompt="c", n_predict=3)
    middle = [0xF8, 97, 0xF9, 98, 0xFA, 99]
    assert engine.requests[-1][1] == middle
    extra = [{"filename": "f", "text": "x"}, {"text": "y"}]
    await complete(client, "/infill", input_prefix="a", input_suffix="b", prompt="c", input_extra=extra, n_predict=3)
    assert engine.requests[-1][1] == [*b"x\ny\n", *middle]
    engine.tokenizer.special_texts["<|file_sep|>"] = 1
    await complete(client, "/infill", input_prefix="a", input_suffix="b", prompt="c", input_extra=extra, n_predict=3)
    before = b"<|repo_name|>myproject\n<|file_sep|>f\nx\n<|file_sep|>tmp\ny\n<|file_sep|>filename\n"
    assert engine.requests[-1][1] == [*before, *middle]


async def test_what_is_served(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = "{{ messages }}"
    found = (await client.get("/props")).json()
    assert (found["model_alias"], found["chat_template"], found["eos_token"]) == ("fake", "{{ messages }}", "<end>")
    assert found["default_generation_settings"]["n_ctx"] == 1000
    assert found["default_generation_settings"]["params"]["n_predict"] == -1
    slots = (await client.get("/slots")).json()
    assert len(slots) == found["total_slots"]
    assert slots[0] == {"id": 0, "n_ctx": 1000, "is_processing": False, "speculative": False}
