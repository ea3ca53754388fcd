"""/api/chat, /api/generate and what tells of the model, in-process. Bodies are those that Ollama's clients send."""

import asyncio
import json
import math
from datetime import datetime
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import InvalidRequest, RequestFailed
from configs.settings import ServerConfig
from server.app import create_app
from tests.server.conftest import running_server
from tests.server.fake_engine import BOS, EOS, FakeEngine

HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% if tools %}<tool_call></tool_call>{% endif %}<think></think>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIMES = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
COUNTS = {"prompt_eval_count", "eval_count"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/api/chat", json={"model": "fake", "messages": HELLO, "tools": [], **fields})


async def generate(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/api/generate", json={"model": "fake", "prompt": "hi", **fields})


POST = {"chat": chat, "generate": generate}


async def answer(client: httpx.AsyncClient, route: str = "chat", **fields: Any) -> dict[str, Any]:
    response = await POST[route](client, stream=False, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def stream(client: httpx.AsyncClient, route: str = "chat", **fields: Any) -> list[dict[str, Any]]:
    response = await POST[route](client, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


async def refused(client: httpx.AsyncClient, route: str = "chat", **fields: Any) -> str:
    response = await POST[route](client, **fields)
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"error"}
    return str(response.json()["error"])


def folded(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that the lines of a stream make up."""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = lines[-1]
    message = whole.get("message", whole)
    for name in ("content", "response", "thinking"):
        pieces = [line.get("message", line).get(name, "") for line in lines]
        if any(pieces) or name in message:
            message[name] = "".join(pieces)
    if calls := [call for line in lines for call in line.get("message", line).get("tool_calls", [])]:
        message["tool_calls"] = calls
    return whole


def without_chance(answer: dict[str, Any]) -> dict[str, Any]:
    """Without times and ids."""
    for call in answer.get("message", answer).get("tool_calls", []):
        del call["id"]
    return {name: value for name, value in answer.items() if name not in TIMES | {"created_at"}}


async def test_shape_of_a_whole_chat(client: httpx.AsyncClient) -> None:
    whole = await answer(client)
    assert datetime.fromisoformat(whole["created_at"]).tzinfo is not None
    assert all(isinstance(whole[name], int) and whole[name] >= 0 for name in TIMES)
    parts = whole["load_duration"] + whole["prompt_eval_duration"] + whole["eval_duration"]
    assert parts == whole["total_duration"] > 0
    assert without_chance(whole) == {
        "model": "fake",
        "message": {"role": "assistant", "content": "<hi>"},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 2,
        "eval_count": 5,
    }


async def test_times_are_measured(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay = 0.02
    whole = await answer(client)
    assert whole["prompt_eval_duration"] >= 15e6
    assert whole["eval_duration"] >= 4 * 15e6


async def test_streaming_is_the_default(client: httpx.AsyncClient) -> None:
    lines = await stream(client)
    assert [line["message"]["content"] for line in lines] == ["<", "h", "i", ">", ""]
    assert all(set(line) == {"model", "created_at", "message", "done"} for line in lines[:-1])
    assert lines[-1].keys() >= {"done_reason", *TIMES, *COUNTS}
    lines = await stream(client, "generate")
    assert [line["response"] for line in lines] == ["<", "h", "i", ">", ""]


async def test_generate_puts_the_prompt_into_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    whole = await answer(client, "generate", system="be brief", suffix="", template="", context=[])
    assert engine.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert whole["response"] == "<be brief|hi>"
    assert whole["context"] == [*b"be brief|hi", *b"<be brief|hi>", EOS]


async def test_context_goes_before_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    first = await answer(client, "generate", prompt="a")
    second = await answer(client, "generate", prompt="b", context=first["context"])
    assert engine.requests[1][1] == [*b"a", *b"<a>", EOS, *b"b"]
    assert second["prompt_eval_count"] == 6
    assert second["context"][:6] == engine.requests[1][1]
    assert "context" in await refused(client, "generate", context=[-1])
    assert "context" in await refused(client, "generate", context=[1 << 40])


async def test_raw_prompts_have_no_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    whole = await answer(client, "generate", raw=True)
    assert engine.requests[0][1] == [BOS, *b"hi"]
    assert engine.messages == []
    assert "context" not in whole
    for name, value in (("system", "x"), ("context", [1]), ("think", True)):
        assert name in await refused(client, "generate", raw=True, **{name: value})


async def test_a_suffix_asks_for_the_middle(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(client, "generate", suffix="there", prompt="hi ")
    assert engine.requests[0][1] == [0xF8, *b"hi ", 0xF9, *b"there", 0xFA]
    assert "system" in await refused(client, "generate", suffix="x", system="y")


@pytest.mark.parametrize(
    ("route", "fields", "empty"),
    [
        ("chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("chat", {"messages": None}, {"message": {"role": "assistant", "content": ""}}),
        ("generate", {"prompt": ""}, {"response": ""}),
        ("generate", {"prompt": None}, {"response": ""}),
    ],
)
async def test_without_a_prompt_the_model_is_only_loaded(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, fields: dict[str, Any], empty: dict[str, Any]
) -> None:
    whole = await answer(client, route, keep_alive="5m", **fields)
    del whole["created_at"]
    assert whole == {"model": "fake", **empty, "done": True, "done_reason": "load"}
    assert engine.requests == []


async def test_history_reaches_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "System", "content": "be brief"},
        {"role": "user", "content": "hi", "images": []},
        {"role": "assistant", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    await answer(client, messages=messages, tools=[WEATHER])
    assert engine.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "content": "rain", "name": "weather"},
    ]
    assert engine.template_kwargs["tools"] == [WEATHER]


async def test_a_final_assistant_message_is_continued(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(client, messages=[*HELLO, {"role": "assistant", "content": "Once"}])
    assert engine.template_kwargs == {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize("route", ["chat", "generate"])
@pytest.mark.parametrize(
    ("think", "kwargs"),
    [
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
    ],
)
async def test_think_is_told_to_the_template(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, think: Any, kwargs: dict[str, Any]
) -> None:
    await answer(client, route, think=think)
    told = {
        name: value for name, value in engine.template_kwargs.items() if name in ("enable_thinking", "reasoning_effort")
    }
    assert told == kwargs


async def test_reasoning_and_calls_are_fields_of_the_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    engine.script = lambda prompt, params: "<think>\nhm\n</think>\n\nLook:" + CALL + CALL
    whole = await answer(client, tools=[WEATHER])
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    calls = [
        {"id": call["id"], "function": {"index": index, **function}}
        for index, call in enumerate(whole["message"]["tool_calls"])
    ]
    assert whole["message"] == {"role": "assistant", "content": "Look:", "thinking": "hm", "tool_calls": calls}
    assert len(calls) == 2
    assert whole["done_reason"] == "stop"
    assert without_chance(folded(await stream(client, tools=[WEATHER]))) == without_chance(whole)
    generated = await answer(client, "generate", think=True)
    assert (generated["thinking"], generated["response"]) == ("hm", "Look:" + CALL + CALL)


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    options = {
        "num_predict": 9,
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 42,
        "stop": ["zz", "yy"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repeat_last_n": -1,
    }
    await answer(client, options=options)
    params = engine.requests[0][2]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0, 5, 0.5)
    assert (params.min_p, params.seed, params.stop, params.repetition_penalty) == (0.25, 42, ("zz", "yy"), 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)


async def test_defaults_are_the_checkpoints(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.default_sampling = {"temperature": 0.3}
    await answer(client)
    params = engine.requests[0][2]
    assert (params.temperature, params.top_k, params.repetition_penalty, params.max_tokens) == (0.3, 0, 1.0, None)


@pytest.mark.parametrize("num_predict", [-1, -2, 5000])
async def test_answers_end_where_the_context_does(
    client: httpx.AsyncClient, engine: FakeEngine, num_predict: int
) -> None:
    engine.script = lambda prompt, params: "x" * 5000
    for route in POST:
        whole = await answer(client, route, options={"num_predict": num_predict})
        assert (whole["done_reason"], whole["eval_count"]) == ("length", 998)
    whole = await answer(client, "generate", raw=True, options={"num_predict": num_predict})
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 997)


async def test_prompts_are_cut_unless_truncate_is_false(client: httpx.AsyncClient) -> None:
    long = "x" * 1001
    assert "1000" in await refused(client, messages=[{"role": "user", "content": long}])
    for fields in ({}, {"raw": True}, {"context": [1, 2]}):
        assert "1000" in await refused(client, "generate", prompt=long, truncate=False, **fields)
    assert "1000" in await refused(client, "generate", prompt=long, suffix="y")
    assert "1000" in await refused(client, "generate", prompt="x", system=long)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("truncate", [None, True])
async def test_a_chat_longer_than_the_context_loses_its_oldest_messages(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, truncate: bool | None
) -> None:
    turns = [{"role": ("user", "assistant")[index % 2], "content": f"{index:02d}" * 20} for index in range(49)]
    messages = [{"role": "system", "content": "be brief"}, *turns]
    response = await chat(client, messages=messages, stream=stream, truncate=truncate)
    assert response.status_code == 200, response.text
    kept = engine.messages[1:]
    assert engine.messages[0]["content"] == "be brief"
    assert kept == turns[-len(kept) :]
    assert kept[0]["role"] == "user"
    assert int(response.headers["x-octavo-dropped-messages"]) == len(turns) - len(kept)
    num_tokens = len(engine.requests[0][1])
    assert 750 - 2 * 41 < num_tokens <= 750  # a quarter of the context is left for the answer
    assert "x-octavo-dropped-messages" not in (await chat(client)).headers


async def test_dropping_messages_keeps_all_system_messages_and_the_last(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    def of(*sizes: tuple[str, int]) -> list[dict[str, str]]:
        return [{"role": role, "content": role[0] * size} for role, size in sizes]

    engine.chat_template = TEMPLATE
    long, system = ("user", 990), ("system", 100)
    for messages, kept in (
        (of(system, long, ("system", 50), ("user", 5)), of(system, ("system", 50), ("user", 5))),
        (of(long, ("user", 900)), of(("user", 900))),  # with less room for the answer, where it has to be
        (of(long, ("assistant", 5), ("tool", 6)), of(("assistant", 5), ("tool", 6))),
        (of(long, ("assistant", 900), ("tool", 200)), of(("tool", 200))),
        (
            of(long, ("user", 9), ("assistant", 5), ("assistant", 6)),
            of(("user", 9), ("assistant", 5), ("assistant", 6)),
        ),
    ):
        response = await chat(client, messages=messages)
        assert response.status_code == 200, response.text
        assert engine.messages == kept
    assert "1000" in await refused(client, messages=of(("system", 600), long, ("user", 500)))


async def test_only_ollamas_chats_lose_messages(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "x" * 600}] * 2
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        fields: dict[str, Any] = {"input": messages} if path == "/v1/responses" else {"messages": messages}
        response = await client.post(path, json={**fields, "max_tokens": 5})
        assert response.status_code == 400, path


async def test_a_prompt_longer_than_the_context_loses_its_beginning(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    long = "".join(chr(97 + index % 26) for index in range(2000))
    response = await generate(client, prompt=long, system="be brief", context=[7] * 100)
    assert response.status_code == 200, response.text
    assert engine.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": long[-741:]}]
    assert (response.headers["x-octavo-prompt-cut-to"], len(engine.requests[0][1])) == ("750", 750)
    response = await generate(client, prompt=long[:500], context=[7] * 600)
    assert engine.requests[1][1] == [*[7] * 250, *long[:500].encode()]
    assert response.headers["x-octavo-prompt-cut-to"] == "750"
    response = await generate(client, prompt=long, raw=True)
    assert engine.requests[2][1] == [BOS, *long[-749:].encode()]
    assert "x-octavo-prompt-cut-to" not in (await generate(client)).headers


async def test_of_a_long_text_little_more_is_encoded_than_is_kept(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, encode = [], engine.encode

    async def noted(text: str, **kwargs: Any) -> list[int]:
        lengths.append(len(text))
        return await encode(text, **kwargs)

    monkeypatch.setattr(engine, "encode", noted)
    long = "x" * 45_000 + "y" * 45_000
    for path, body in (
        ("/api/generate", {"prompt": long}),
        ("/api/generate", {"prompt": long, "raw": True}),
        ("/api/embed", {"input": ["hi", long]}),
        ("/api/embeddings", {"prompt": long}),
    ):
        lengths.clear()
        assert (await client.post(path, json=body)).status_code == 200
        assert lengths[-1] <= 8000
    assert engine.embedded[0] == [[BOS, *b"x" * 999]]


HINTS = {
    "num_ctx": 1000,
    "num_keep": 4,
    "num_batch": 512,
    "num_gpu": 99,
    "main_gpu": 0,
    "use_mmap": True,
    "num_thread": 8,
    "low_vram": False,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "tfs_z": 1.0,
    "typical_p": 1.0,
    "penalize_newline": True,
    "repeat_last_n": 64,
    "seed": -1,
    "top_k": None,
}


def ignored(response: httpx.Response) -> set[str]:
    assert response.status_code == 200, response.text
    return set(response.headers.get("x-octavo-ignored-fields", "").split(", ")) - {""}


async def test_hints_and_neutral_options_pass(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await chat(client, options={**HINTS, "unheard_of": 1}, keep_alive=-1, truncate=False, shift=False)
    assert ignored(response) == {"options.unheard_of"}
    assert engine.requests[0][2].seed is None


@pytest.mark.parametrize("route", ["chat", "generate"])
@pytest.mark.parametrize(
    "options",
    [
        {"mirostat": 2},
        {"tfs_z": 0.5},
        {"typical_p": 0.7},
        {"penalize_newline": False},
        {"num_ctx": 1001},
        {"num_ctx": 131072.0},
        {"repeat_last_n": 64, "repeat_penalty": 1.1},
        {"repeat_last_n": 33, "frequency_penalty": 0.5},
        {"logits_all": True, "vocab_only": True, "embedding_only": True},
    ],
    ids=str,
)
async def test_what_is_served_otherwise_is_named(
    client: httpx.AsyncClient, route: str, options: dict[str, Any]
) -> None:
    named = options.keys() - {"repeat_penalty", "frequency_penalty"}
    assert ignored(await POST[route](client, options=options)) == {f"options.{name}" for name in named}


async def test_ollamas_defaults_may_be_said(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    defaults = {"repeat_last_n": 64, "repeat_penalty": 1.1, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0}
    response = await chat(client, options=defaults, truncate=True, shift=True)
    assert ignored(response) == {"options.repeat_last_n", "shift"}
    assert engine.requests[0][2].repetition_penalty == 1.1


async def test_a_window_of_nothing_penalises_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.default_sampling = {"repetition_penalty": 1.1}
    response = await chat(client, options={"repeat_last_n": 0, "presence_penalty": 1, "frequency_penalty": 1})
    params = engine.requests[0][2]
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
    assert ignored(response) == set()


async def test_numbers_without_a_fraction_are_integers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(client, options={"top_k": 40.0, "seed": 42.0, "num_predict": 4.0, "num_ctx": 512.0, "temperature": 1})
    params = engine.requests[0][2]
    assert (params.top_k, params.seed, params.max_tokens, params.temperature) == (40, 42, 4, 1)
    for value in (0.5, "4", 1e300, True):
        assert "num_predict" in await refused(client, options={"num_predict": value})


async def test_strict_fields_refuse_unknown_options(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(strict_fields=True), "fake"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        error = await refused(client, options={"unheard_of": 1})
    assert "unheard_of" in error


@pytest.mark.parametrize(
    "options",
    [
        {"num_ctx": "large"},
        {"repeat_last_n": 0.5},
        {"num_predict": 0},
        {"num_predict": -3},
        {"temperature": -1},
        {"temperature": "hot"},
        {"repeat_penalty": 0},
        {"stop": [""]},
        {"stop": "x" * 5000},
        {"seed": 0.5},
    ],
    ids=str,
)
async def test_bad_options_are_named(client: httpx.AsyncClient, options: dict[str, Any]) -> None:
    error = await refused(client, options=options)
    name = {"repeat_penalty": "repe", "temperature": "temperature", "seed": "seed"}.get(
        next(iter(options)), next(iter(options))
    )
    assert name in error


async def test_penalties_of_the_checkpoint_count_too(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.default_sampling = {"repetition_penalty": 1.1}
    assert ignored(await chat(client, options={"repeat_last_n": 64})) == {"options.repeat_last_n"}
    assert ignored(await chat(client, options={"repeat_last_n": 64, "repeat_penalty": 1.0})) == set()


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages"),
        ("chat", {"messages": [{"content": "x"}]}, "messages"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, "messages"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages"),
        ("chat", {"tools": [{"type": "function"}]}, "tools"),
        ("chat", {"format": "yaml"}, "format"),
        ("chat", {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("chat", {"think": 3}, "think"),
        ("generate", {"images": ["aGk="]}, "images"),
        ("generate", {"template": "{{ .Prompt }}"}, "template"),
        ("generate", {"width": 64}, "width"),
        ("generate", {"format": 3}, "format"),
    ],
)
async def test_bad_fields_are_named(client: httpx.AsyncClient, route: str, fields: dict[str, Any], param: str) -> None:
    assert param in await refused(client, route, **fields)


@pytest.mark.parametrize("route", ["chat", "generate"])
@pytest.mark.parametrize(("form", "kind"), [("json", "json_object"), ({"type": "object"}, "json_schema")])
async def test_format_constrains_the_answer(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, form: Any, kind: str
) -> None:
    await answer(client, route, format=form)
    structured = engine.requests[0][2].structured
    assert structured is not None
    assert structured.kind == kind
    engine.fail_after = (0, InvalidRequest("no such keyword", param="structured"))
    assert "format" in await refused(client, route, format=form)


@pytest.mark.parametrize(("route", "field"), [("chat", "messages"), ("generate", "prompt")])
async def test_what_a_template_refuses_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, route: str, field: str
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise InvalidRequest("no", param="messages")

    monkeypatch.setattr(engine, "render_chat", refuse)
    assert await refused(client, route) == f"{field}: no"


async def test_an_empty_format_constrains_nothing(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await answer(client, format="")
    assert engine.requests[0][2].structured is None


@pytest.mark.parametrize("route", ["chat", "generate"])
async def test_logprobs(client: httpx.AsyncClient, route: str) -> None:
    whole = await answer(client, route, logprobs=True, top_logprobs=1)
    top = {"token": "<", "logprob": -0.5, "bytes": [60]}
    assert whole["logprobs"][0] == {**top, "top_logprobs": [top]}
    lines = await stream(client, route, logprobs=True, top_logprobs=1)
    assert [one for line in lines for one in line.get("logprobs", [])] == whole["logprobs"]
    assert "logprobs" not in await answer(client, route, top_logprobs=1)
    assert ignored(await POST[route](client, top_logprobs=1)) == {"top_logprobs"}
    assert ignored(await POST[route](client, logprobs=True, top_logprobs=1)) == set()


async def test_names_of_the_model(client: httpx.AsyncClient) -> None:
    assert (await answer(client, model="fake:latest"))["model"] == "fake"
    response = await chat(client, model="other")
    assert response.status_code == 404
    assert "model" in response.json()["error"]


@pytest.mark.parametrize("route", ["chat", "generate"])
async def test_errors_by_time(client: httpx.AsyncClient, engine: FakeEngine, route: str) -> None:
    engine.fail_after = (0, RequestFailed("not a number"))
    assert (await POST[route](client)).status_code == 500
    engine.fail_after = (2, RequestFailed("not a number"))
    lines = await stream(client, route)
    assert lines[-1] == {"error": "not a number"}
    assert len(lines) == 3


async def test_tags(client: httpx.AsyncClient) -> None:
    [model] = (await client.get("/api/tags")).json()["models"]
    assert (model["name"], model["model"], len(model["digest"])) == ("fake", "fake", 64)
    assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None
    assert model["details"]["family"] == "fake"
    assert model["details"]["quantization_level"] == "F32"


@pytest.mark.parametrize(
    ("model", "form"),
    [("smollm2", "gguf"), ("/models/a.gguf", "gguf"), ("/models/a", "safetensors"), ("a.gguf/b", "safetensors")],
)
async def test_the_format_is_the_files(engine: FakeEngine, model: str, form: str) -> None:
    transport = httpx.ASGITransport(create_app(engine, ServerConfig(model=model), "fake"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("/api/tags", "/api/ps"):
            [found] = (await client.get(path)).json()["models"]
            assert found["details"]["format"] == form
        assert (await client.post("/api/show", json={"model": "fake"})).json()["details"]["format"] == form


EMBEDDINGS = {"h": [104, 1, 2, 3], "hi": [105, 1, 2, 3]}
"""Of the fake engine, by text."""


def unit(vector: list[float]) -> Any:
    return pytest.approx([value / math.hypot(*vector) for value in vector])


@pytest.mark.parametrize("text", ["hi", ["hi"], ["hi", "h"]])
async def test_embed(client: httpx.AsyncClient, text: str | list[str]) -> None:
    body = {"model": "fake:latest", "input": text, "options": {"num_ctx": 5}, "keep_alive": "5m", "truncate": True}
    response = await client.post("/api/embed", json=body)
    assert ignored(response) == set()
    whole = response.json()
    texts = [text] if isinstance(text, str) else text
    assert whole["embeddings"] == [unit(EMBEDDINGS[one]) for one in texts]
    assert whole["prompt_eval_count"] == sum(1 + len(one) for one in texts)
    assert whole["total_duration"] > 0
    assert (whole["model"], whole["load_duration"]) == ("fake", 0)


async def test_embeddings_are_cut_to_dimensions(client: httpx.AsyncClient) -> None:
    for dimensions in (0, 2, 4, None):
        whole = (await client.post("/api/embed", json={"input": "hi", "dimensions": dimensions})).json()
        assert whole["embeddings"] == [unit(EMBEDDINGS["hi"][: dimensions or 4])]
    for dimensions in (5, -1, 1.5):
        response = await client.post("/api/embed", json={"input": "hi", "dimensions": dimensions})
        assert (response.status_code, "dimensions" in response.json()["error"]) == (400, True)


async def test_long_texts_are_embedded_by_their_beginning(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    long = "x" * 999 + "y" * 100
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        assert (await client.post(path, json={field: long})).status_code == 200
        assert engine.embedded[0] == [[BOS, *b"x" * 999]]
    response = await client.post("/api/embed", json={"input": ["hi", long], "truncate": False})
    assert (response.status_code, "input" in response.json()["error"]) == (400, True)


async def test_the_older_route_embeds_one_text_as_the_model_gives_it(client: httpx.AsyncClient) -> None:
    response = await client.post("/api/embeddings", json={"model": "fake", "prompt": "hi", "keep_alive": -1})
    assert response.json() == {"embedding": EMBEDDINGS["hi"]}


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_without_a_text_nothing_is_embedded(client: httpx.AsyncClient, path: str) -> None:
    field, answered = ("input", "embeddings") if path == "/api/embed" else ("prompt", "embedding")
    for body in ({}, {field: ""}, {field: None}):
        assert (await client.post(path, json=body)).json()[answered] == []
    for value in (5, [5], {}):
        response = await client.post(path, json={field: value})
        assert (response.status_code, field in response.json()["error"]) == (400, True)


OPEN_WEBUI: list[tuple[str, dict[str, Any]]] = [
    (
        "/api/chat",
        {
            "model": "fake:latest",
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "images": []}],
            "options": {
                "mirostat": 0,
                "mirostat_eta": 0.1,
                "mirostat_tau": 5.0,
                "tfs_z": 1,
                "num_ctx": 32768,
                "num_batch": 512,
                "num_keep": 24,
                "num_predict": 128,
                "repeat_last_n": 64,
                "repeat_penalty": 1.1,
                "temperature": 0.8,
                "top_k": 40,
                "top_p": 0.9,
                "min_p": 0,
                "seed": 1,
                "stop": ["<|eot_id|>"],
                "use_mmap": True,
                "use_mlock": False,
                "num_thread": 2,
                "num_gpu": 1,
                "think": True,
            },
            "stream": True,
            "think": False,
            "format": None,
            "keep_alive": "5m",
            "tools": [],
        },
    ),
    ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "Title?"}], "stream": False}),
    ("/api/generate", {"model": "fake", "prompt": "", "keep_alive": 0}),
    ("/api/embed", {"input": ["hi", "h"], "model": "fake", "truncate": True}),
    ("/api/embed", {"input": "hi", "model": "fake:latest"}),
    ("/api/embeddings", {"model": "fake", "prompt": "hi"}),
    ("/api/pull", {"name": "fake", "model": "fake"}),
    ("/api/show", {"name": "fake", "model": "fake"}),
]


@pytest.mark.parametrize(("path", "body"), OPEN_WEBUI, ids=lambda value: value if isinstance(value, str) else "")
async def test_what_open_webui_sends_is_answered(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    headers = {"content-type": "application/json", "authorization": "Bearer "}
    response = await client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert all("error" not in json.loads(line) for line in response.text.splitlines())


async def test_the_served_model_is_pulled_already(client: httpx.AsyncClient) -> None:
    for name in ("fake", "fake:latest"):
        whole = await client.post("/api/pull", json={"model": name, "stream": False})
        assert whole.json() == {"status": "success"}
        lines = await client.post("/api/pull", json={"name": name, "insecure": False})
        assert lines.headers["content-type"].startswith("application/x-ndjson")
        assert [json.loads(line) for line in lines.text.splitlines()] == [{"status": "success"}]
    other = await client.post("/api/pull", json={"model": "other"})
    assert (other.status_code, "other" in other.json()["error"]) == (404, True)


@pytest.mark.parametrize("what", ["copy", "create", "push", "delete"])
async def test_models_are_not_managed(client: httpx.AsyncClient, what: str) -> None:
    method = "DELETE" if what == "delete" else "POST"
    response = await client.request(method, f"/api/{what}", json={"model": "fake", "source": "fake"})
    assert (response.status_code, f"/api/{what}" in response.json()["error"]) == (400, True)


async def test_ps(client: httpx.AsyncClient) -> None:
    [model] = (await client.get("/api/ps")).json()["models"]
    assert (model["name"], model["context_length"], model["size_vram"]) == ("fake", 1000, 0)
    assert datetime.fromisoformat(model["expires_at"]).year == 9999


@pytest.mark.parametrize(
    ("count", "dtype", "quantization", "size", "shown"),
    [
        (134_515_008, "bfloat16", "none", 269_030_016, ("134.52M", "BF16")),
        (8_030_261_248, "bfloat16", "int4", 4_015_130_624, ("8.0B", "int4")),
        (1234, "float32", "none", 4936, ("1K", "F32")),
        (12, "float32", "int8", 12, ("12", "int8")),
        (1000, "float32", "gguf (Q4_1, Q8_0)", 750, ("1K", "Q4_1")),
        (1000, "float32", "gguf (Q4_K), int4 in 3 of 5 linear layers", 500, ("1K", "Q4_K")),
    ],
)
async def test_sizes(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    count: int,
    dtype: str,
    quantization: str,
    size: int,
    shown: tuple[str, str],
) -> None:
    engine.info = msgspec.structs.replace(engine.info, num_parameters=count, dtype=dtype, quantization=quantization)
    [model] = (await client.get("/api/tags")).json()["models"]
    assert model["size"] == size
    assert (model["details"]["parameter_size"], model["details"]["quantization_level"]) == shown


async def test_show(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.chat_template = TEMPLATE
    engine.default_sampling = {"temperature": 0.3, "top_k": 20}
    for body in ({"model": "fake"}, {"name": "fake:latest", "verbose": True}):
        shown = (await client.post("/api/show", json=body)).json()
        assert shown["template"] == TEMPLATE
        assert shown["parameters"] == "temperature 0.3\ntop_k 20"
        assert shown["model_info"]["fake.context_length"] == 1000
        assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
    assert (await client.post("/api/show", json={"model": "other"})).status_code == 404


async def test_show_of_a_plain_model(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def no_infill(prefix: str, suffix: str) -> list[int]:
        raise InvalidRequest("no such tokens", param="suffix")

    engine.encode_infill = no_infill  # type: ignore[method-assign]
    shown = (await client.post("/api/show", json={"model": "fake"})).json()
    assert (shown["template"], shown["capabilities"]) == ("", ["completion"])


async def test_version(client: httpx.AsyncClient) -> None:
    response = await client.get("/api/version")
    assert [int(part) for part in response.json()["version"].split(".")] >= [0, 6, 4]
    assert (await client.head("/api/version")).status_code == 200


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_goes_away_aborts_its_request(streamed: bool) -> None:
    engine = FakeEngine(lambda prompt, params: "x" * 900)
    engine.delay = 0.02
    with running_server(engine, ServerConfig()) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            request = asyncio.create_task(chat(http, stream=streamed))
            while not engine.num_tokens:
                await asyncio.sleep(0.01)
            request.cancel()
        async with asyncio.timeout(5):
            while not engine.aborted:
                await asyncio.sleep(0.01)


CALLS = st.builds(
    '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format,
    st.sampled_from(["weather", "unknown"]),
    st.sampled_from(['{"city": "Paris"}', "{}", '{"a": [1, {"b": null}]}', "3", '{"cut']),
)
PARTS = st.one_of(CALLS, st.text('ab <>{}\n"', max_size=8), st.sampled_from(["<tool_call>", "</think>", "<think>"]))
SCRIPTS = st.builds(
    lambda thought, parts: thought + "".join(parts),
    st.sampled_from(["", "<think>\nhm\n</think>\n\n", "<think>", "<think></think>"]),
    st.lists(PARTS, max_size=4),
)


@settings(max_examples=50, deadline=None)
@given(SCRIPTS, st.integers(1, 60), st.sampled_from(["chat", "generate"]))
def test_streamed_and_whole_answers_are_the_same(script: str, num_predict: int, route: str) -> None:
    engine = FakeEngine(lambda prompt, params: script)
    engine.chat_template = TEMPLATE
    fields: dict[str, Any] = {"options": {"num_predict": num_predict, "stop": ["ab"]}, "logprobs": True}
    if route == "chat":
        fields["tools"] = [WEATHER]

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        transport = httpx.ASGITransport(create_app(engine, ServerConfig(), "fake"))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            whole = await answer(client, route, **fields)
            lines = await stream(client, route, **fields)
        logprobs = [one for line in lines for one in line.get("logprobs", [])]
        return whole, {**folded(lines), "logprobs": logprobs}

    whole, streamed = asyncio.run(both())
    assert without_chance(streamed) == without_chance(whole)
