"""Every error is OpenAI's error object, whatever goes wrong."""

import contextlib
import time
from typing import Any

import httpx
import pytest

from configs.errors import InvalidRequest
from configs.settings import ServerConfig
from server.app import create_app
from server.bodies import validate
from server.openai.completions import CompletionRequest
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES

JSON = {"content-type": "application/json"}
ROUTES = ["/v1/completions", "/v1/chat/completions"]


def check_error(response: httpx.Response, status: int) -> dict[str, str | None]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"",
        b"[]",
        b"null",
        b"5",
        b"{}",
        b"{",
        b'{"prompt": "x", "messages": []} x',
        b"\xff\xfe",
        b'{"a": "\xff", "prompt": "\xff", "messages": "\xff"}',
        b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b"[" * 50_000,
    ],
)
async def test_malformed_bodies(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    error = check_error(await client.post(path, content=body, headers=JSON), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("path", "field"), [(ROUTES[0], "prompt"), (ROUTES[1], "messages")])
async def test_missing_fields_are_named(client: httpx.AsyncClient, path: str, field: str) -> None:
    assert check_error(await client.post(path, json={}), 400)["param"] == field


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"],
)
async def test_what_is_no_finite_number(client: httpx.AsyncClient, field: str, number: str) -> None:
    value = f'{{"5": {number}}}' if field == "logit_bias" else number
    body = f'{{"prompt": "a", "{field}": {value}}}'
    check_error(await client.post(ROUTES[0], content=body, headers=JSON), 400)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_json_has_finite_numbers_alone(client: httpx.AsyncClient, number: str) -> None:
    body = f'{{"prompt": "a", "metadata": [{number}]}}'
    assert check_error(await client.post(ROUTES[0], content=body, headers=JSON), 400)["code"] == "invalid_json"
    assert (await client.post(ROUTES[0], json={"prompt": number})).status_code == 200


@pytest.mark.parametrize("field", ['"prompt": "a\\ud800b"', '"prompt": "a", "stop": "\\ud800"'])
async def test_lone_surrogates(client: httpx.AsyncClient, field: str) -> None:
    check_error(await client.post(ROUTES[0], content=f"{{{field}}}", headers=JSON), 400)


@pytest.mark.parametrize("depth", [100, *range(430, 500)])
async def test_tools_of_any_depth(client: httpx.AsyncClient, depth: int) -> None:
    schema = b'{"a":[' * depth + b"1" + b"]}" * depth
    tools = b'[{"type": "function", "function": {"name": "f", "parameters": ' + schema + b"}}]"
    body = b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + tools + b"}"
    check_error(await client.post("/v1/chat/completions", content=body, headers=JSON), 400)


async def test_other_content_types(client: httpx.AsyncClient) -> None:
    response = await client.post(ROUTES[0], content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert "content-type" in str(check_error(response, 400)["message"])


@pytest.mark.parametrize("path", ["/v1", "/v1/audio/speech", "/v1/models/none", "/models/none", "/v1/v1"])
async def test_unknown_paths(client: httpx.AsyncClient, path: str) -> None:
    check_error(await client.get(path), 404)


@pytest.mark.parametrize("path", ROUTES)
async def test_wrong_methods(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    check_error(response, 405)
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("path", ROUTES)
async def test_announced_bodies_that_are_too_large(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, content=b"x" * 100_001, headers=JSON)
    assert "100000" in str(check_error(response, 413)["message"])


async def test_unannounced_bodies_that_are_too_large(client: httpx.AsyncClient) -> None:
    sent = 0

    async def endless():  # type: ignore[no-untyped-def]
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 10_000

    check_error(await client.post(ROUTES[0], content=endless(), headers=JSON), 413)
    assert sent < 20


async def test_a_dead_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/health")).status_code == 200
    engine.is_dead = True
    assert (await client.get("/health")).status_code == 503
    for path in ROUTES:
        response = await client.post(path, json={"prompt": "a", "messages": [{"role": "user", "content": "a"}]})
        assert check_error(response, 503)["code"] == "engine_dead"


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("fake", "model", "octavo")
    assert model["max_model_len"] == 1000
    assert (await client.get("/v1/models/fake")).json() == model
    assert check_error(await client.get("/v1/models/other"), 404)["code"] == "model_not_found"


async def test_every_name_is_listed(engine: FakeEngine) -> None:
    app = create_app(engine, ServerConfig(served_model_name=("a", "b/c")), "a")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["a", "b/c"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b/c", False)
        assert (await client.get("/v1/models/b/c")).json() == listed["data"][1]
        assert [model["name"] for model in (await client.get("/api/tags")).json()["models"]] == ["a", "b/c"]


async def test_names_with_slashes(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(), "maker/model"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/v1/models/maker/model")).json()["id"] == "maker/model"


@pytest.mark.parametrize(
    "prompt",
    [
        b'"' + b"word " * (4 << 20) + b'"',
        b'"' + b"\\n" * (10 << 20) + b'"',
        b"[" + b"1," * (10 << 20) + b"1]",
        b"[" + b"1234," * 3_900_000 + b"1]",
        b"[" + b"1234," * 990_000 + b"1]",
        b'["a"' + b",1" * 990_000 + b"]",
        b"[" + b"null," * 990_000 + b"1]",
        b'"a", "logit_bias": {' + b",".join(b'"x%d":"y"' % number for number in range(160_000)) + b"}",
        b"[" + b"[]," * (7 << 20) + b"[]]",
        b"[" + b'"",' * (7 << 20) + b'""]',
        b"[" * (20 << 20),
    ],
    ids=["text", "escapes", "ids", "long ids", "most ids", "mixed", "nulls", "keys", "lists", "texts", "brackets"],
)
def test_twenty_megabytes_do_not_stall_other_requests(prompt: bytes) -> None:
    """Parsing holds the interpreter's lock, so all of its CPU time is an upper bound of what others wait."""
    data = b'{"prompt": ' + prompt + b"}"
    before = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        validate(data, CompletionRequest)
    assert time.thread_time() - before < 0.5  # 0.15 s on an idle machine


async def test_what_the_tokenizer_is(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = "{{ messages }}"
    info = (await client.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<begin>", "<end>", None)
    assert (info["chat_template"], info["model_max_length"]) == ("{{ messages }}", 1000)


LONG = "x" * 50_000


@pytest.mark.parametrize("path", BODIES)
async def test_no_error_repeats_what_it_was_sent_at_length(engine: FakeEngine, path: str) -> None:
    app = create_app(engine, ServerConfig(strict_fields=True), MODEL)
    fields: dict[str, Any] = {
        LONG: 1,
        "model": LONG,
        "request_id": LONG,
        "stop": [LONG] * 99,
        "logit_bias": {str(number): 101 for number in range(9999)},
        "logprob_token_ids": list(range(49_152)),
        "seed": 10**300,
        "response_format": {"type": LONG},
        "structured_outputs": {LONG: 1},
        "format": {LONG: LONG},
        "tools": [{"type": LONG, "name": LONG, "function": {"name": LONG}}],
        "tool_choice": {"type": LONG, "name": LONG},
        "options": {LONG: 1, "stop": LONG},
        "include": [LONG],
        "previous_response_id": LONG,
        "messages": [{"role": LONG, "content": [{"type": LONG}]}],
        "input": [{"type": LONG}],
        "sampling_params": {LONG: LONG, "logprob_token_ids": list(range(49_152))},
        "encoding_format": LONG,
    }
    refused = 0
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for name, value in fields.items():
            for stream in (False, True):
                answer = await client.post(path, json={**BODIES[path], name: value, "stream": stream})
                refused += answer.status_code >= 400
                assert answer.status_code < 500
                assert answer.is_success or len(answer.content) < 2000
        assert refused > 4
        for method, url in [("GET", f"{path}/{LONG}"), ("POST", f"/{LONG}"), ("GET", f"/v1/requests/{LONG}")]:
            answer = await client.request(method, url)
            assert answer.status_code >= 400
            assert len(answer.content) < 2000


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"]
)
async def test_nor_does_an_error_of_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, stream: bool, num_tokens: int
) -> None:
    engine.fail_after = (num_tokens, InvalidRequest("a long story: " + LONG, param=LONG))
    answer = await client.post(path, json={**BODIES[path], "stream": stream})
    assert "a long story" in answer.text
    assert len(answer.content) < 8000
