"""/v1/completions in-process: echo, logprobs of prompts, best_of, suffix, token ids, constraints."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.errors import InvalidRequest
from configs.sampling import StructuredOutput
from configs.settings import ServerConfig
from engine.messages import TokenLogprobs
from scheduler.request import Request
from server.app import create_app
from tests.server.fake_engine import BOS, FakeEngine, two_beams
from tests.server.test_completions_route import PATH, complete, refused, stream


async def test_echo_puts_the_prompt_in_front(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=["ab", "c"], echo=True)
    assert [choice["text"] for choice in answer["choices"]] == ["ab<ab>", "c<c>"]
    answer = await complete(client, prompt=[97, 98], echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["ab<ab>"] * 2


async def test_echo_with_logprobs_names_every_token_of_the_prompt(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=[97, 98, 99], echo=True, logprobs=1, max_tokens=1)
    assert answer["choices"][0]["text"] == "abc<"
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "c", "<"],
        "token_logprobs": [None, -98.0, -99.0, -0.5],
        "top_logprobs": [None, {"A": -0.1, "b": -98.0}, {"A": -0.1, "c": -99.0}, {"<": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], [[97], [98, 99]]])
async def test_a_prompt_alone_can_be_scored(client: httpx.AsyncClient, prompt: Any) -> None:
    answer = await complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert answer["usage"]["completion_tokens"] == 0
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        assert "".join(choice["logprobs"]["tokens"]).removeprefix("<begin>") == choice["text"]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert None not in choice["logprobs"]["token_logprobs"][1:]
    chunks = await stream(client, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"


async def test_max_tokens_zero_needs_something_to_say(client: httpx.AsyncClient) -> None:
    assert (await refused(client, max_tokens=0))["param"] == "max_tokens"
    assert (await complete(client, max_tokens=0, echo=True))["choices"][0]["text"] == "ab"


async def test_prompt_logprobs_by_token_id(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=[97, 98], prompt_logprobs=1, max_tokens=1)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "65": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
        "98": {"logprob": -98.0, "rank": None, "decoded_token": "b"},
    }
    assert answer["choices"][0]["text"] == "<"


async def test_token_ids_of_prompt_and_output(client: httpx.AsyncClient) -> None:
    [choice] = (await complete(client, prompt="ab", return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == [BOS, 97, 98]
    assert choice["token_ids"] == [*b"<ab>", 257]
    chunks = await stream(client, prompt="ab", return_token_ids=True)
    assert [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])] == choice["token_ids"]
    assert [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk["choices"][0]]


async def test_tokens_as_ids(client: httpx.AsyncClient) -> None:
    fields = {"logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 1, "echo": True, "prompt": [97, 98]}
    logprobs = (await complete(client, **fields))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", "token_id:60"]
    assert logprobs["top_logprobs"][2] == {"token_id:60": -0.5}


async def test_best_of_takes_the_likeliest(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, params: f"{prompt}{params.seed}"
    likelihood = {"a1": -3.0, "a2": -1.0, "a3": -2.0, "b1": -1.0, "b2": -2.0, "b3": -3.0}

    def logprobs(request: Request) -> list[TokenLogprobs]:
        key = f"{bytes(request.prompt_token_ids).decode()}{request.sampling_params.seed}"
        return [TokenLogprobs(request.token_ids[-1], likelihood[key], [])]

    engine.logprobs = logprobs  # type: ignore[method-assign]
    answer = await complete(client, prompt=[[97], [98]], best_of=3, n=2, seed=1)
    assert [choice["text"] for choice in answer["choices"]] == ["a2", "a3", "b1", "b2"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 6 * 3
    assert answer["usage"]["prompt_tokens"] == 2
    assert (await refused(client, best_of=1, n=2))["param"] == "best_of"
    assert (await refused(client, best_of=3, n=2, stream=True))["param"] == "best_of"
    assert (await refused(client, best_of=1_000_000))["param"] == "best_of"


async def test_suffix_is_filled_in(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, prompt="ab", suffix="cd")
    assert engine.requests[0][1] == [0xF8, *b"ab", 0xF9, *b"cd", 0xFA]
    assert (await refused(client, prompt="ab", suffix="cd", echo=True))["param"] == "suffix"
    assert (await refused(client, prompt=[97, 98], suffix="cd"))["param"] == "suffix"


async def test_truncated_prompts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, prompt=list(range(10)), truncate_prompt_tokens=3)
    await complete(client, prompt=[97] * 2000, truncate_prompt_tokens=-1, max_tokens=5)
    assert engine.requests[0][1] == [7, 8, 9]
    assert len(engine.requests[1][1]) == 995
    await complete(client, prompt=list(range(10)), truncate_prompt_tokens=3, truncation_side="right")
    assert engine.requests[2][1] == [0, 1, 2]
    for wrong in (0, -2):
        assert (await refused(client, truncate_prompt_tokens=wrong))["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
            StructuredOutput("json_schema", '{"type": "object"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput("choice", '["a", "b"]')),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, StructuredOutput("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput("json_object")),
        ({"guided_grammar": 'root ::= "x"'}, StructuredOutput("grammar", 'root ::= "x"')),
        ({"guided_json": {"type": "null"}}, StructuredOutput("json_schema", '{"type": "null"}')),
        (
            {"guided_grammar": 'start: "x"', "structured_outputs": {"grammar": 'start: "x"'}},
            StructuredOutput("grammar", 'start: "x"'),
        ),
        (
            {"guided_json": '{"type":"null"}', "structured_outputs": {"json": {"type": "null"}}},
            StructuredOutput("json_schema", '{"type": "null"}'),
        ),
        (
            {"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}},
            StructuredOutput("choice", '["a"]'),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
    ],
)
async def test_structured_outputs(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: StructuredOutput | None
) -> None:
    await complete(client, **fields)
    assert engine.requests[0][2].structured == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
        ({"structured_outputs": {"json": "{"}, "guided_json": {}}, "guided_json"),
        ({"logprob_token_ids": [300]}, "logprob_token_ids"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"logprob_token_ids": [97]}, "logprob_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert (await refused(client, **fields))["param"] == param


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_grammar_that_cannot_be_compiled_names_its_field(
    client: httpx.AsyncClient, engine: FakeEngine, streamed: bool
) -> None:
    engine.fail_after = (0, InvalidRequest("no such type", param="structured"))
    neutral = {"response_format": {"type": "text"}}
    fields = {"structured_outputs": {"json": {"type": "wrong"}}, "stream": streamed, **neutral}
    assert (await refused(client, **fields))["param"] == "structured_outputs"


async def test_strict_servers_refuse_unknown_fields(engine: FakeEngine) -> None:
    app = create_app(engine, ServerConfig(strict_fields=True), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await refused(client, prompt="a", foo=1))["param"] == "foo"
        assert await complete(client, prompt="a", user="u", metadata={"a": "b"})


FIELDS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["ab", "", [97, 98], ["x", "yz"], [[97], [98, 99, 100]], "hé🙂"]),
        "max_tokens": st.sampled_from([None, 0, 1, 3, 50]),
    },
    optional={
        "n": st.integers(1, 3),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "stop": st.sampled_from(["b", ">", ["zz", "a"]]),
        "seed": st.integers(0, 5),
    },
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS)
async def test_streamed_equals_whole(fields: dict[str, Any]) -> None:
    app = create_app(FakeEngine(lambda prompt, params: f"<{prompt}{params.seed}>"), ServerConfig(), "fake")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.post(PATH, json=fields)
        options = {"include_usage": True}
        streamed = await client.post(PATH, json={**fields, "stream": True, "stream_options": options})
    assert streamed.status_code == response.status_code
    if response.status_code == 400:
        assert streamed.json() == response.json()
        return
    whole = response.json()
    lines = streamed.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert chunks[-1]["usage"] == whole["usage"]
    assert joined(chunks[:-1]) == {choice["index"]: choice for choice in whole["choices"]}


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Each choice as its chunks make it."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        [piece] = chunk["choices"]
        choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None})
        assert choice.get("finish_reason") is None, "a chunk after the last"
        for name, value in piece.items():
            if name == "text" or name == "token_ids":
                choice[name] = choice.get(name, [] if name == "token_ids" else "") + value
            elif name == "logprobs" and value is not None:
                before = choice[name] or {key: [] for key in value}
                choice[name] = {key: before[key] + value[key] for key in value}
            elif name != "logprobs":
                choice[name] = value
    return choices


async def test_beam_search(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.logprobs = two_beams  # type: ignore[method-assign]
    fields = {"prompt": ["a", "b"], "use_beam_search": True, "n": 2}
    answer = await complete(client, **fields, length_penalty=0.5, temperature=0)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "long"), (1, "s"), (2, "long"), (3, "s")
    ]  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 2 * (5 + 2)
    by_penalty = {0: ["s", "long"], None: ["long", "s"]}
    for penalty, texts in by_penalty.items():
        answer = await complete(client, **fields, length_penalty=penalty)
        assert [choice["text"] for choice in answer["choices"]] == texts * 2
    assert await complete(client, **fields, top_p=1.0, repetition_penalty=1.0, presence_penalty=0)
    for wrong in ({"length_penalty": 1e300}, {"length_penalty": -11}, {"max_tokens": 0, "echo": True}):
        assert (await refused(client, **{**fields, **wrong}))["param"] == next(iter(wrong))
    for wrong in ({"stream": True}, {"n": 11}, {"stop": "x"}, {"logprobs": 1}, {"min_tokens": 1}, {"top_k": 5}):
        assert (await refused(client, **{**fields, **wrong}))["param"] == next(iter(wrong))
    assert (await refused(client, length_penalty=2))["param"] == "length_penalty"


async def test_a_request_may_bring_its_id(client: httpx.AsyncClient) -> None:
    assert (await complete(client, prompt="a", request_id="mine"))["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    "name",
    [
        "a\nb",
        "a\n",
        "a\r",
        "\x1b[31m",
        "a\u2028b",
        "\x85",
        "\0",
        "\u202e",
        "../../x",
        "a b",
        "a=b",
        '"',
        "\u00e9",
        "",
        "x" * 129,
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ],
)
async def test_ids_that_could_do_harm_where_they_are_printed_are_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str
) -> None:
    answer = await client.post(path, json={**body, "request_id": name})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    good = await client.post(path, json={**body, "request_id": "Az09._-" + "x" * 121})
    assert good.status_code == 200
