"""/tokenize, /detokenize, /apply-template and what the server says about itself, in-process."""

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.settings import ServerConfig
from server import version
from server.app import create_app
from tests.server.conftest import MODEL
from tests.server.fake_engine import BOS, VOCAB_SIZE, FakeEngine
from tests.server.test_embeddings_routes import post, refused
from tests.server.test_http_errors import check_error

CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


async def test_a_text(client: httpx.AsyncClient) -> None:
    plain = {"count": 3, "max_model_len": 1000, "tokens": [BOS, 97, 98], "token_strs": None}
    assert await post(client, "/tokenize", prompt="ab") == plain
    without = await post(client, "/tokenize", prompt="ab", add_special_tokens=False, return_token_strs=True)
    assert (without["tokens"], without["token_strs"]) == ([97, 98], ["<0x61>", "<0x62>"])
    assert (await post(client, "/tokenize", prompt=""))["tokens"] == []


async def test_a_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, "/tokenize", messages=CHAT, add_generation_prompt=False)
    assert answer["tokens"] == list(b"ab|c")
    assert engine.template_kwargs["add_generation_prompt"] is False
    special = await post(client, "/tokenize", messages=CHAT, add_special_tokens=True)
    assert special["tokens"] == [BOS, *b"ab|c"]
    assert engine.template_kwargs["add_generation_prompt"] is True
    await post(client, "/tokenize", messages=CHAT, continue_final_message=True, chat_template_kwargs={"x": 1})
    assert engine.template_kwargs.items() >= {"continue_final_message": True, "x": 1}.items()


async def test_llama_cpps_form(client: httpx.AsyncClient) -> None:
    assert await post(client, "/tokenize", content="aé") == {"tokens": [97, 0xC3, 0xA9]}
    assert await post(client, "/tokenize", content="a", add_special=True) == {"tokens": [BOS, 97]}
    pieces = await post(client, "/tokenize", content="aé", with_pieces=True)
    assert pieces["tokens"] == [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_what_is_tokenized_comes_back(text: str) -> None:
    async def both() -> None:
        transport = httpx.ASGITransport(create_app(FakeEngine(), ServerConfig(), MODEL))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            tokens = (await post(client, "/tokenize", prompt=text, add_special_tokens=False))["tokens"]
            assert await post(client, "/detokenize", tokens=tokens) == {"prompt": text, "content": text}

    asyncio.run(both())


async def test_special_tokens_are_shown(client: httpx.AsyncClient) -> None:
    assert (await post(client, "/detokenize", tokens=[97, VOCAB_SIZE - 1]))["prompt"] == "a<end>"
    assert (await post(client, "/detokenize", tokens=[]))["prompt"] == ""


async def test_the_prompt_of_a_chat(client: httpx.AsyncClient) -> None:
    assert await post(client, "/apply-template", messages=CHAT) == {"prompt": "ab|c"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"content": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("/tokenize", {"messages": [{"role": "forbidden", "content": "a"}]}, "messages"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": CHAT, "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, path: str, body: Any, param: str) -> None:
    assert (await refused(client, path, **body))["param"] == param


async def test_the_server_tells_what_it_is(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": version()}
    info = (await client.get("/server_info")).json()
    assert (info["model"], info["version"], info["max_model_len"]) == (MODEL, version(), 1000)
    assert (info["device"], info["dtype"], info["kv_cache_tokens"]) == ("cpu", "float32", 4096)


async def test_ping_is_health(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for call in (client.get, client.post):
        assert (await call("/ping")).json()["status"] == "ok"
    engine.is_dead = True
    assert (await client.get("/ping")).status_code == 503


async def test_load_counts_requests_until_they_end(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def load() -> int:
        return int((await client.get("/load")).json()["server_load"])

    assert await load() == 0
    engine.delay = 0.2
    running = [asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"})) for _ in range(2)]
    running.append(asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": True})))
    await asyncio.sleep(0.1)
    assert await load() == 3
    await asyncio.gather(*running)
    assert await load() == 0
    check_error(await client.post("/v1/completions", json={"prompt": 5}), 400)
    assert await load() == 0


async def test_wrong_methods_are_told_all_right_ones(client: httpx.AsyncClient) -> None:
    response = await client.put("/v1/responses/x")
    check_error(response, 405)
    assert {"GET", "DELETE"} <= set(response.headers["allow"].split(", "))
