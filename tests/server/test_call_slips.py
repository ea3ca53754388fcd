"""What models write beside the form that their template teaches, and answers that are cut, over HTTP."""

import json
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.test_chat_route import HELLO, PATH

HERMES = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>"
XML = HERMES + "<function="
LLAMA = '{% for tool in tools %}{{ tool }}{% endfor %}{"name": function name, "parameters": dictionary}'
ONE_CALL = LLAMA + "{% if not message.tool_calls|length == 1 %}{{ raise_exception('one') }}{% endif %}"
MISTRAL = (
    "{% for tool in tools %}{{ tool }}{% endfor %}[TOOL_CALLS]"
    "{% if tool_call.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
)
PYTHON = "{% for tool in tools %}{{ tool }}{% endfor %}[func_name1(params_name1=params_value1)]"
THINKING = HERMES + "</think>"
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}}
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'


async def choice(
    client: httpx.AsyncClient, engine: FakeEngine, template: str, text: str, **fields: Any
) -> dict[str, Any]:
    """The whole answer's choice; the stream's pieces join to the same."""
    engine.chat_template = template
    engine.script = lambda prompt, params: text
    body = {"messages": HELLO, "tools": [TOOL], **fields}
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    [whole] = response.json()["choices"]
    streamed = (await client.post(PATH, json={**body, "stream": True})).text
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.split("\n") if line.startswith("data: {")]
    message = whole["message"]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == (message["content"] or "")
    thoughts = "".join(chunk["delta"].get("reasoning_content", "") for chunk in chunks)
    assert thoughts == message.get("reasoning_content", "")
    pieces = [piece for chunk in chunks for piece in chunk["delta"].get("tool_calls", [])]
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert arguments == "".join(call["function"]["arguments"] for call in message.get("tool_calls", []))
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    return dict(whole)


def calls(whole: dict[str, Any]) -> list[Any]:
    found = [call["function"] for call in whole["message"].get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in found]


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("<parameter=city>\nRome\n<parameter=days>\n3\n</parameter>\n", {"city": "Rome", "days": 3}),
        ("<parameter=days>\n3\n<parameter=city>\nRome\n</parameter>\n", {"city": "Rome", "days": 3}),
        ("<parameter=city>Rome<parameter=days>3</parameter>\n", {"city": "Rome", "days": 3}),
        ("<parameter=city>\na\nb\n\n<parameter=days>\n3\n</parameter>\n", {"city": "a\nb\n", "days": 3}),
        ("<parameter=city>\nRome\n", {"city": "Rome"}),
        ("<parameter=days>\n3\n", {"days": 3}),
        ("<parameter=city>\n<b>\n</b> <param\n</parameter>\n", {"city": "<b>\n</b> <param"}),
        ("<parameter=city>\n<function>\n</function>\n</parameter>\n", {"city": "<function>\n</function>"}),
        ("<parameter=city>\n\n<parameter=days>\n3\n</parameter>\n", {"city": "", "days": 3}),
    ],
)
async def test_a_parameter_ends_where_the_next_begins(
    client: httpx.AsyncClient, engine: FakeEngine, inside: str, arguments: dict[str, Any]
) -> None:
    text = f"<tool_call>\n<function=weather>\n{inside}</function>\n</tool_call>"
    whole = await choice(client, engine, XML, text)
    assert calls(whole) == [("weather", arguments)]
    assert whole["message"]["content"] is None


LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize(
    "text",
    [
        LLAMA_CALL,
        f"[{LLAMA_CALL}]",
        f"[\n  {LLAMA_CALL}\n]",
        '{"type": "function", "function": {"name": "weather", "parameters": {"city": "Rome"}}}',
        '{"function": {"name": "weather", "arguments": {"city": "Rome"}}, "type": "function"}',
        '[{"type": "function", "function": {"parameters": {"city": "Rome"}, "name": "weather"}}]',
        '{"function": "weather", "parameters": {"city": "Rome"}}',
        '{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}}',
    ],
)
async def test_calls_in_a_list_or_in_openais_wrapper_leave_no_content(
    client: httpx.AsyncClient, engine: FakeEngine, text: str
) -> None:
    whole = await choice(client, engine, LLAMA, text)
    assert calls(whole) == [("weather", {"city": "Rome"})]
    assert whole["message"]["content"] is None


@pytest.mark.parametrize("text", ["[1] and [2]", "[]", '["a", {"b": 1}]', '{"function": 3}', '{"function": {"x": 1}}'])
async def test_lists_and_objects_that_are_no_calls_stay_content(
    client: httpx.AsyncClient, engine: FakeEngine, text: str
) -> None:
    assert (await choice(client, engine, LLAMA, text))["message"]["content"] == text


HERMES_CALL = f"<tool_call>\n{ROME}\n</tool_call>"
XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, HERMES_CALL),
        (XML, XML_CALL),
        (MISTRAL, f"[TOOL_CALLS][{ROME}]"),
        (LLAMA, LLAMA_CALL),
        (PYTHON, '[weather(city="Rome", days=3)]'),
    ],
)
@pytest.mark.parametrize("before", ["", "Let me look. "])
async def test_a_cut_call_is_part_of_one_or_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, template: str, text: str, before: str
) -> None:
    for length in range(2, len(text)):
        whole = await choice(client, engine, template, before + text, max_tokens=len(before) + length)
        assert whole["finish_reason"] == "length"
        content = whole["message"]["content"] or ""
        if template in (LLAMA, PYTHON) and not whole["message"].get("tool_calls"):
            # until its name is there, nothing tells a call from any text with brackets
            begun = text[:length]
            assert content.rstrip() == before.rstrip() or ('"name"' not in begun and "weather" not in begun)
        else:
            assert content.rstrip() == before.rstrip(), (length, content)


async def test_forced_calls_that_are_cut_leave_no_content(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for forced in ("required", {"type": "function", "function": {"name": "weather"}}):
        for length in range(1, 12):
            whole = await choice(client, engine, LLAMA, LLAMA_CALL, max_tokens=length, tool_choice=forced)
            assert not whole["message"]["content"], length


@pytest.mark.parametrize("text", ["a <tool_call>", "a <tool_call>\n{", "<tool", "x < y", "a <t"])
async def test_markers_that_the_model_ended_with_stay_content(
    client: httpx.AsyncClient, engine: FakeEngine, text: str
) -> None:
    assert (await choice(client, engine, HERMES, text))["message"]["content"] == text


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (f"<think>\nI look it up.\n\n{HERMES_CALL}", "I look it up.", None, 1),
        (f"<think>{HERMES_CALL}\n{HERMES_CALL}", "", None, 2),
        (f"<think>\nSo:\n{HERMES_CALL[:48]}", "So:", None, 1),
        (f"<think>\nI look.\n{HERMES_CALL}\n</think>\nDone.", f"I look.\n{HERMES_CALL}", "Done.", 0),
        (f"<think>\nI look.\n{HERMES_CALL}\n</think>\n{HERMES_CALL}", f"I look.\n{HERMES_CALL}", None, 1),
        ("<think>\nA <tool_call> is", "A <tool_call> is", "", 0),
        ("<think>\nA\n<tool_call>\nb\n</think>\n\nc", "A\n<tool_call>\nb", "c", 0),
    ],
)
async def test_a_call_ends_reasoning_that_nothing_else_ends(
    client: httpx.AsyncClient, engine: FakeEngine, text: str, reasoning: str, content: str | None, num_calls: int
) -> None:
    whole = await choice(client, engine, THINKING, text)
    message = whole["message"]
    assert message.get("reasoning_content", "") == reasoning
    assert message["content"] == content
    assert len(message.get("tool_calls", [])) == num_calls
    assert whole["finish_reason"] == ("tool_calls" if num_calls else "stop")


def asked(*ids: str | None, given: bool = True) -> dict[str, Any]:
    function = {"name": "weather", "arguments": "{}"}
    made = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": "I look.", "tool_calls": made if given else []}


def told(call_id: str | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})}


async def messages(client: httpx.AsyncClient, engine: FakeEngine, template: str, *history: Any) -> list[dict[str, Any]]:
    engine.chat_template = template
    response = await client.post(PATH, json={"messages": [*HELLO, *history], "tools": [TOOL]})
    assert response.status_code == 200, response.text
    return engine.messages


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("call_0a1b2c3d4e5f", "chatcmpl-tool-1234"),
        ("toolu_01", "abcdefghi"),
        ("a", "b"),
        ("functions.weather:0", "ABCDEFGH9"),
        (None, None),
    ],
)
async def test_ids_become_what_the_template_takes_and_go_on_belonging_together(
    client: httpx.AsyncClient, engine: FakeEngine, first: str | None, second: str | None
) -> None:
    history = (asked(first, second), told(first, "one"), told(second, "two"), asked(second), told(second, "three"))
    _, two_calls, one, two, last, three = await messages(client, engine, MISTRAL, *history)
    ids = [call["id"] for call in two_calls["tool_calls"]]
    assert all(len(made) == 9 and made.isalnum() for made in ids)
    assert ids[0] != ids[1]
    assert [one["tool_call_id"], two["tool_call_id"]] == ids
    assert three["tool_call_id"] == last["tool_calls"][0]["id"]
    if second in ("abcdefghi", "ABCDEFGH9"):
        assert ids[1] == second


async def test_ids_stay_where_the_template_takes_any(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    _, call, result = await messages(client, engine, HERMES, asked("call_1"), told("call_1", "one"))
    assert (call["tool_calls"][0]["id"], result["tool_call_id"]) == ("call_1", "call_1")


async def test_several_calls_are_told_one_by_one_where_the_template_takes_one(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    history = (asked("a", "b", "c"), told("b", "of b"), told("a", "of a"), told("c", "of c"), HELLO[0])
    found = await messages(client, engine, ONE_CALL, *history)
    assert [message["role"] for message in found] == ["user", *["assistant", "tool"] * 3, "user"]
    assert [message["content"] for message in found[1:7]] == ["I look.", "of a", "", "of b", "", "of c"]
    assert [len(message["tool_calls"]) for message in found[1:7:2]] == [1, 1, 1]
    found = await messages(client, engine, ONE_CALL, asked("x", "y"), told(None, "of x"), told(None, "of y"))
    assert [message["content"] for message in found[1:]] == ["I look.", "of x", "", "of y"]
    found = await messages(client, engine, ONE_CALL, asked("x", "y"))
    assert [message["role"] for message in found] == ["user", "assistant", "assistant"]


@pytest.mark.parametrize(("template", "several"), [(LLAMA, True), (ONE_CALL, False)])
async def test_forced_calls_are_one_where_the_template_takes_one(
    client: httpx.AsyncClient, engine: FakeEngine, template: str, several: bool
) -> None:
    await choice(client, engine, template, LLAMA_CALL, tool_choice="required")
    structured = engine.requests[-1][2].structured
    assert structured is not None
    assert json.loads(structured.source)["format"]["stop_after_first"] is not several
