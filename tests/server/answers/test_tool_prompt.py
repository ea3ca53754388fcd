"""Tools in plain conversations: what the model is told is what the parser reads."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.text.chat_template import ChatTemplate
from server.answers.parser import AnswerParser
from server.answers.prompt import plain_tools
from server.answers.styles import HERMES, style_of

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
TOOL = {"type": "function", "function": {"name": "now", "description": "The “time”", "parameters": {"type": "object"}}}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": content}


def test_tools_are_described_in_the_system_message() -> None:
    user = {"role": "user", "content": "hi"}
    for begin in ([], [{"role": "system", "content": "Be brief."}], [{"role": "system", "content": ""}]):
        system, *others = plain_tools([*begin, user], [TOOL])
        assert system["role"] == "system"
        assert json.dumps(TOOL, ensure_ascii=False) in system["content"].splitlines()
        assert system["content"].startswith("Be brief.\n\n") == any(message["content"] for message in begin)
        assert others == [user]


def test_tools_are_described_to_the_user_where_there_is_no_system_role() -> None:
    first, second = plain_tools(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], [TOOL], system_role=False
    )
    assert first["role"] == "user"
    assert json.dumps(TOOL, ensure_ascii=False) in first["content"]
    assert first["content"].endswith("\n\nhi")
    assert second == {"role": "assistant", "content": "ho"}


def test_the_description_shows_the_format_that_is_read() -> None:
    (system,) = plain_tools([], [TOOL])
    start = system["content"].index("<tool_call>")
    shown = system["content"][start:].replace("{<its arguments>}", "{}")
    (called,) = AnswerParser(None, HERMES, {}).parse(shown).tool_calls
    assert (called.name, called.arguments) == ("<name of the function>", "{}")


def test_results_that_follow_each_other_are_one_message() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call("now", "{}"), call("now", {})]},
        result("one"),
        result("two"),
        {"role": "assistant", "content": "ok"},
        result("three"),
    ]
    plain = plain_tools(messages, [])
    assert [message["role"] for message in plain] == ["user", "assistant", "user", "assistant", "user"]
    assert plain[2]["content"] == ("<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>")
    assert plain[4]["content"] == "<tool_response>\nthree\n</tool_response>"


def test_messages_of_the_request_are_left_as_they_are() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call("now", "{}")]},
        result("x"),
    ]
    before = json.dumps(messages)
    plain_tools(messages, [TOOL], system_role=False)
    plain_tools(messages, [TOOL])
    assert json.dumps(messages) == before


@given(
    st.sampled_from([None, "", "Let me see."]),
    st.lists(st.dictionaries(st.text(), st.integers() | st.text(st.characters(codec="utf-8"))), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_model_sees_its_own_calls_as_it_has_to_write_them(
    content: str | None, wanted: list[dict[str, Any]], as_text: bool
) -> None:
    calls = [call("now", json.dumps(arguments) if as_text else arguments) for arguments in wanted]
    messages = plain_tools([{"role": "assistant", "content": content, "tool_calls": calls}], [])
    shown = ChatTemplate(TEMPLATE, {}).render(messages).removeprefix("<assistant>").removesuffix("</>")
    answer = AnswerParser(None, HERMES, {}).parse(shown)
    assert answer.content.strip() == (content or "")
    assert [json.loads(called.arguments) for called in answer.tool_calls] == wanted


def test_templates_that_know_no_tools_or_no_system_message_are_told() -> None:
    assert not style_of(TEMPLATE).knows_tools
    assert style_of(TEMPLATE).takes_system_messages
    assert not style_of("{{ raise_exception('System role not supported') }}").takes_system_messages
