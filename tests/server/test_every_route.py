"""What holds for every route that takes a body, whichever protocol it is of, in-process."""

import json
from typing import Any

import httpx
import pytest

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.described import ROUTES
from tests.server.fake_engine import FakeEngine

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": USER},
    "/inference/v1/generate": {"token_ids": [104, 105], "sampling_params": {"max_tokens": 5}},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/api/chat": {"model": "fake", "messages": USER},
    "/api/generate": {"model": "fake", "prompt": "hi"},
    "/api/show": {"model": "fake"},
    "/api/embed": {"model": "fake", "input": "hi"},
    "/api/embeddings": {"model": "fake", "prompt": "hi"},
    "/api/pull": {"model": "fake"},
    "/v1/embeddings": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/v2/rerank": {"query": "hi", "documents": ["ho"]},
    "/reranking": {"query": "hi", "documents": ["ho"]},
    "/completion": {"prompt": "hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/apply-template": {"messages": USER},
}
EVERY = pytest.mark.parametrize("path", BODIES)
JSON = {"content-type": "application/json"}


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """OpenAI's error object, which other protocols' errors may add to; Ollama's clients read a text."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert isinstance(error, str) is response.url.path.startswith("/api/"), error
    if isinstance(error, str):
        assert set(response.json()) == {"error"}
        error = {"message": error}
    else:
        assert set(error) >= {"message", "type"}
    assert (response.json().get("type") == "error") is response.url.path.startswith("/v1/messages")
    assert error["message"]
    return dict(error)


def test_these_are_all() -> None:
    assert {one.path for one in ROUTES if one.body_fields} == BODIES.keys()


@EVERY
async def test_the_smallest_body_is_answered(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json=BODIES[path])
    assert response.status_code == 200, response.text


@EVERY
@pytest.mark.parametrize("body", [b"not json", b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 50_000, b'{"model": 5}'])
async def test_what_is_no_such_body_is_refused(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    check_error(await client.post(path, content=body, headers=JSON), 400)


@EVERY
async def test_half_a_surrogate_pair_is_no_text(client: httpx.AsyncClient, path: str) -> None:
    body = json.dumps({**BODIES[path], "model": "a\ud800b"})
    check_error(await client.post(path, content=body, headers=JSON), 400)
    check_error(await client.post(path, content=json.dumps(BODIES[path])[:-1] + ', "x": "\\udc00"}', headers=JSON), 400)


@EVERY
async def test_other_content_types_are_refused_but_by_ollamas_routes(client: httpx.AsyncClient, path: str) -> None:
    body = json.dumps(BODIES[path])
    for kind in ("text/plain", "application/octet-stream", "application/x-www-form-urlencoded"):
        response = await client.post(path, content=body, headers={"content-type": kind})
        if path.startswith("/api/"):  # Ollama looks at none, and its clients say anything
            assert response.status_code == 200, response.text
        else:
            assert "application/json" in check_error(response, 400)["message"]


@EVERY
@pytest.mark.parametrize("kind", [None, "", "Application/JSON", "application/vnd.api+JSON; charset=UTF-8"])
async def test_json_by_any_spelling_is_json(client: httpx.AsyncClient, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = await client.post(path, content=json.dumps(BODIES[path]), headers=headers)
    assert response.status_code == 200, response.text


@EVERY
async def test_other_methods_are_refused(client: httpx.AsyncClient, path: str) -> None:
    for method in ("PUT", "PATCH"):
        response = await client.request(method, path, json=BODIES[path])
        check_error(response, 405)
        assert "POST" in response.headers["allow"]


@EVERY
async def test_only_the_served_model_answers(client: httpx.AsyncClient, path: str) -> None:
    error = check_error(await client.post(path, json={**BODIES[path], "model": "no-such"}), 404)
    assert "fake" in error["message"]
    assert error.get("code") in ("model_not_found", None)


GENERATING = {
    "/v1/completions": "stop",
    "/v1/chat/completions": "stop",
    "/v1/messages": "stop_sequences",
    "/inference/v1/generate": "sampling_params",
    "/api/chat": "options",
    "/api/generate": "options",
}


@pytest.mark.parametrize(("path", "field"), GENERATING.items())
async def test_editors_send_many_stop_strings(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, field: str
) -> None:
    for stops in ([f"<|{index}|>" for index in range(40)], ["x" * 1500], [chr(200 + index) for index in range(256)]):
        value = stops if field.startswith("stop") else {"stop": stops}
        response = await client.post(path, json={**BODIES[path], field: value})
        assert response.status_code == 200, response.text
        assert engine.requests[-1][2].stop == tuple(stops)
    for refused in (["x"] * 257, ["x" * 2000] * 3):
        value = refused if field.startswith("stop") else {"stop": refused}
        check_error(await client.post(path, json={**BODIES[path], field: value}), 400)


@pytest.mark.parametrize("path", ["/v1/", "/v1/no", "/api/no", "/api/chat/no", "/api/blobs/x", "/v1/messages/no"])
async def test_unknown_paths_have_the_error_of_their_protocol(client: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "POST", "HEAD"):
        response = await client.request(method, path, json={})
        assert response.status_code == 404
        if method != "HEAD":
            check_error(response, 404)


@pytest.mark.parametrize("path", [*BODIES, "/api/tags", "/api/no", "/v1/messages/no"])
async def test_wrong_keys_have_the_error_of_the_paths_protocol(engine: FakeEngine, path: str) -> None:
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(api_key=("k",)), "fake"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        check_error(await client.post(path, json={}, headers={"authorization": "Bearer x"}), 401)


@EVERY
async def test_every_name_of_the_model_answers(engine: FakeEngine, path: str) -> None:
    """Answers hold the first of them."""
    app = create_app(engine, ServerConfig(served_model_name=("first", "gpt-4o", "maker/b")), "first")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for name in ("first", "gpt-4o", "maker/b", "gpt-4o:latest", ""):
            response = await client.post(path, json={**BODIES[path], "model": name})
            assert response.status_code == 200, response.text
            assert "gpt-4o" not in response.text
        error = check_error(await client.post(path, json={**BODIES[path], "model": "gpt-4"}), 404)
        assert all(name in error["message"] for name in ("'first'", "'gpt-4o'", "'maker/b'"))


@EVERY
async def test_bodies_over_the_limit_are_refused(client: httpx.AsyncClient, path: str) -> None:
    check_error(await client.post(path, content=b"x" * 100_001, headers=JSON), 413)


@EVERY
async def test_nothing_is_generated_by_a_dead_engine(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    engine.is_dead = True
    check_error(await client.post(path, json=BODIES[path]), 503)
