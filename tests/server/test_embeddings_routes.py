"""/v1/embeddings, /pooling, /score and /rerank, in-process; the fake engine embeds a prompt as [last id, 1, 2, 3]."""

import base64
import math
import struct
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.settings import ServerConfig
from server.app import create_app
from server.openai.embeddings import PAIRS, cosines, normalized
from tests.server.conftest import MODEL
from tests.server.fake_engine import BOS, FakeEngine
from tests.server.test_http_errors import check_error

PATH = "/v1/embeddings"


def unit(*values: float) -> list[float]:
    return [value / math.sqrt(sum(one * one for one in values)) for value in values]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def vectors(client: httpx.AsyncClient, **body: Any) -> list[list[float]]:
    answer = await post(client, PATH, **body)
    assert [(one["object"], one["index"]) for one in answer["data"]] == [
        ("embedding", index) for index in range(len(answer["data"]))
    ]
    return [one["embedding"] for one in answer["data"]]


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, str | None]:
    return check_error(await client.post(path, json=body), 400)


@pytest.mark.parametrize(
    ("given", "last_ids"),
    [("ab", [98]), (["a", "bc"], [97, 99]), ([5, 6], [6]), ([[5], [6, 7]], [5, 7])],
)
async def test_forms_of_input(client: httpx.AsyncClient, given: Any, last_ids: list[int]) -> None:
    assert await vectors(client, input=given) == [pytest.approx(unit(one, 1, 2, 3)) for one in last_ids]


async def test_the_answer_around_the_embeddings(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, input=["ab", "c"], user="me")
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}  # with two beginnings of sequence


async def test_base64_holds_the_same_numbers(client: httpx.AsyncClient) -> None:
    [plain] = await vectors(client, input="a")
    [coded] = await vectors(client, input="a", encoding_format="base64")
    assert struct.unpack("<4f", base64.b64decode(str(coded))) == pytest.approx(plain)


def test_the_openai_client(url: str) -> None:
    """It asks for base64 unless told otherwise."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        answer = api.embeddings.create(model=MODEL, input=["a", "b"], dimensions=2)
        plain = api.embeddings.create(model=MODEL, input=["a", "b"], dimensions=2, encoding_format="float")
    assert [one.embedding for one in answer.data] == [pytest.approx(unit(97, 1)), pytest.approx(unit(98, 1))]
    assert [one.embedding for one in plain.data] == [pytest.approx(one.embedding) for one in answer.data]


@pytest.mark.parametrize("dimensions", [1, 3, 4])
async def test_dimensions_cut_and_scale_again(client: httpx.AsyncClient, dimensions: int) -> None:
    [embedding] = await vectors(client, input="a", dimensions=dimensions)
    assert embedding == pytest.approx(unit(*[97, 1, 2, 3][:dimensions]))


@pytest.mark.parametrize("off", [{"normalize": False}, {"use_activation": False}, {"embd_normalize": -1}])
async def test_embeddings_as_the_model_gives_them(client: httpx.AsyncClient, off: dict[str, Any]) -> None:
    assert await vectors(client, input="a", **off) == [[97, 1, 2, 3]]
    assert await vectors(client, input="a", dimensions=2, **off) == [[97, 1]]
    on = {name: 2 if name == "embd_normalize" else True for name in off}
    assert await vectors(client, input="a", **on) == [pytest.approx(unit(97, 1, 2, 3))]


async def test_what_the_engine_gets(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, PATH, input=[[1, 2]], pooling="mean", priority=3, cache_salt="s")
    assert engine.embedded[0] == [[1, 2]]
    assert engine.embedded[2:] == ("mean", 3, "s")
    await post(client, PATH, input="a", add_special_tokens=False)
    assert engine.embedded[0] == [[97]]
    assert engine.embedded[2:] == ("last", 0, None)


async def test_the_checkpoints_pooling_unless_the_server_or_the_request_says_otherwise(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.default_pooling = "mean"
    assert await vectors(client, input=[[1, 3]], normalize=False) == [[2, 1, 2, 3]]
    assert await vectors(client, input=[[1, 3]], normalize=False, pooling="last") == [[3, 1, 2, 3]]


async def test_the_servers_pooling(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(pooling="mean"), MODEL))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert await vectors(client, input=[[1, 3]], normalize=False) == [[2, 1, 2, 3]]
        assert await vectors(client, input=[[1, 3]], normalize=False, pooling="last") == [[3, 1, 2, 3]]


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [3, 4]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 2]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4]),
        ({}, [1, 2, 3, 4]),
    ],
)
async def test_truncation(client: httpx.AsyncClient, engine: FakeEngine, cut: Any, kept: list[int]) -> None:
    await post(client, PATH, input=[[1, 2, 3, 4]], **cut)
    assert engine.embedded[0] == [kept]


async def test_a_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "ab"}]
    await post(client, PATH, messages=messages)
    assert engine.embedded[0] == [[97, 98]]
    assert engine.template_kwargs["add_generation_prompt"] is False
    await post(client, PATH, messages=messages, add_special_tokens=True)
    assert engine.embedded[0] == [[BOS, 97, 98]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "messages": []}, "messages"),
        ({"messages": []}, "messages"),
        ({"input": "a", "chat_template": "x"}, "chat_template"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": True, "embd_normalize": -1}, "embd_normalize"),
        ({"input": "a", "endianness": "big"}, "endianness"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    assert (await refused(client, PATH, **body))["param"] == param


async def test_an_input_that_is_too_long(client: httpx.AsyncClient) -> None:
    error = await refused(client, PATH, input=["a", "b" * 1000])
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert len(await vectors(client, input="b" * 1000, truncate_prompt_tokens=-1)) == 1


async def test_pooling_is_raw(client: httpx.AsyncClient) -> None:
    answer = await post(client, "/pooling", input="a", task="embed")
    assert answer["data"] == [{"object": "pooling", "index": 0, "data": [97, 1, 2, 3]}]
    answer = await post(client, "/pooling", input="a", normalize=True)
    assert answer["data"][0]["data"] == pytest.approx(unit(97, 1, 2, 3))
    assert (await refused(client, "/pooling", input="a", task="classify"))["param"] == "task"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", PAIRS)
async def test_scores(client: httpx.AsyncClient, path: str, names: tuple[str, str]) -> None:
    first, second = names
    one_to_many = await post(client, path, **{first: "a", second: ["a", "\x01"]})
    expected = [1.0, (97 + 14) / math.sqrt((97**2 + 14) * 15)]
    assert [one["score"] for one in one_to_many["data"]] == pytest.approx(expected)
    pairs = await post(client, path, **{first: ["a", "\x01"], second: ["a", "\x01"]})
    assert [one["score"] for one in pairs["data"]] == pytest.approx([1, 1])
    assert [one["index"] for one in pairs["data"]] == [0, 1]
    assert pairs["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "data_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": "b" * 2000}, "text_2"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ],
)
async def test_scores_that_are_refused(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    assert (await refused(client, "/score", **body))["param"] == param


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_puts_the_best_first(client: httpx.AsyncClient, path: str) -> None:
    documents = ["\x01", {"text": "a"}, "\x20"]
    answer = await post(client, path, query="a", documents=documents)
    assert [one["index"] for one in answer["results"]] == [1, 2, 0]
    assert [one["document"]["text"] for one in answer["results"]] == ["a", "\x20", "\x01"]
    values = [one["relevance_score"] for one in answer["results"]]
    assert values == sorted(values, reverse=True)
    scored = await post(client, "/score", text_1="a", text_2=["\x01", "a", "\x20"])
    assert {one["index"]: one["score"] for one in scored["data"]} == dict(zip([1, 2, 0], values, strict=True))
    best = await post(client, path, query="a", documents=documents, top_n=1, return_documents=False)
    assert best["results"] == [{"index": 1, "relevance_score": pytest.approx(1)}]


async def test_long_documents_can_be_cut(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, "/rerank", query="abc", documents=["def"], max_tokens_per_query=3, max_tokens_per_doc=2)
    assert engine.embedded[0] == [[BOS, 97, 98], [BOS, 100]]
    assert (await refused(client, "/rerank", query="a", documents=["b"], top_n=-1))["param"] == "top_n"
    assert (await refused(client, "/rerank", query="", documents=["b"], add_special_tokens=False))["param"] == "query"


async def test_a_dead_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_dead = True
    check_error(await client.post(PATH, json={"input": "a"}), 503)


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 2), min_size=1))
def test_arithmetic(pairs: list[tuple[float, float]]) -> None:
    vectors = [[pair[side] for pair in pairs] for side in (0, 1)]
    one, other = normalized(np.array(vectors))
    assert math.hypot(*one) == pytest.approx(1 if any(pair[0] for pair in pairs) else 0)
    [cosine] = cosines(vectors, 1)
    assert -1 - 1e-9 <= cosine <= 1 + 1e-9
    assert cosine == pytest.approx(1 - math.dist(one, other) ** 2 / 2) or not (any(one) and any(other))
