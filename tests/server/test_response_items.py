"""Items of the Responses API as messages of a chat."""

from typing import Any

import pytest

from configs.errors import InvalidRequest
from server.convert.response_items import chat_messages, read_items

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "2"}
TOLD = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
RESULT = {"role": "tool", "tool_call_id": "c", "name": "f", "content": "2"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def model(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **fields}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [user("hi")]),
        ([{"role": "developer", "content": "d"}, user("u")], [{"role": "developer", "content": "d"}, user("u")]),
        ([user("a"), user("b"), model("c"), model("d")], [user("a"), user("b"), model("c"), model("d")]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [user("a\nb")],
        ),
        (
            [
                {"role": "assistant", "content": [{"type": "output_text", "text": "a", "logprobs": None}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ],
            [model("a"), model("no")],
        ),
        ([CALL, OUTPUT], [model("", tool_calls=[TOLD]), RESULT]),
        ([model("so"), CALL, CALL, OUTPUT], [model("so", tool_calls=[TOLD, TOLD]), RESULT]),
        ([CALL, model("so")], [model("", tool_calls=[TOLD]), model("so")]),
        ([CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "2"}]}], [model("", tool_calls=[TOLD]), RESULT]),
        ([{**CALL, "arguments": ""}], [model("", tool_calls=[{**TOLD, "function": {"name": "f", "arguments": {}}}])]),
        (
            [thought("t"), model("a"), thought("s"), CALL],
            [model("a", reasoning_content="t"), model("", reasoning_content="s", tool_calls=[TOLD])],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, model("a")],
            [model("a", reasoning_content="s")],
        ),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, model("a")], [model("a")]),
        ([user("a"), thought("led to nothing")], [user("a")]),
    ],
)
def test_items_become_messages(items: Any, messages: list[dict[str, Any]]) -> None:
    assert chat_messages(read_items(items, lambda item_id: None, [])) == messages


def test_items_get_ids_and_keep_theirs() -> None:
    [mine, given] = read_items([user("a"), {**user("b"), "id": "msg_b", "type": "message"}], lambda item_id: None, [])
    assert mine.id
    assert mine.id.startswith("msg_")
    assert (given.id, given.status) == ("msg_b", "completed")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "computer_call"}, "input[0]: type 'computer_call' is not supported"),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "input[0].content[0]: type 'input_audio' is not supported",
        ),
        (
            {**OUTPUT, "output": [{"type": "input_smell"}]},
            "input[0].output[0]: parts of type 'input_smell' are not supported; only text",
        ),
        ({"role": "user", "content": 1}, "input[0].content: Expected str | array, got int"),
        ({"role": "user"}, "input[0]: Object missing required field content"),
        ({}, "input[0]: Object missing required field id"),
        (OUTPUT, "no function call before the output of 'c'"),
    ],
)
def test_what_is_wrong_is_named(item: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_messages(read_items([item], lambda item_id: None, []))
    assert (caught.value.message, caught.value.param) == (message, "input")
