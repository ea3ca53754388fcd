"""Each style's calls, well-formed and not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.answers.delta import Answer
from server.answers.parser import AnswerParser
from server.answers.styles import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PYTHONIC,
    PYTHONIC_TAGGED,
    QWEN_CODER,
    TOOL_STYLES,
    ToolStyle,
    style_of,
)

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "note": {"type": ["string", "null"]},
            "size": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
            "more": {"$ref": "#/$defs/More"},
            "scale": {"const": 1},
            "unit": {"enum": ["C", 3, None]},
        },
    },
    "now": {},
}

names = st.sampled_from(sorted(FUNCTIONS))
characters = st.characters(codec="utf-8")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(characters),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(characters), inner, max_size=3),
    max_leaves=8,
)
json_calls = st.lists(
    st.tuples(names, st.dictionaries(st.text(characters), json_values, max_size=3)), min_size=1, max_size=3
)
keywords = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
keyword_calls = st.lists(st.tuples(names, st.dictionaries(keywords, json_values, max_size=3)), min_size=1, max_size=3)


def parse(style: ToolStyle, text: str) -> Answer:
    return AnswerParser(None, style, FUNCTIONS).parse(text)


def calls(style: ToolStyle, text: str) -> list[tuple[str, Any]]:
    """Names and arguments, of an answer that has no content."""
    answer = parse(style, text)
    assert answer.content == ""
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


@given(
    json_calls, st.booleans(), st.sampled_from([None, 2]), st.booleans(), st.sampled_from(["arguments", "parameters"])
)
def test_json_calls_are_read_back(
    wanted: list[tuple[str, Any]], ascii_only: bool, indent: int | None, arguments_first: bool, key: str
) -> None:
    def written(name: str, arguments: Any) -> str:
        call = {key: arguments, "name": name} if arguments_first else {"name": name, key: arguments}
        return json.dumps(call, ensure_ascii=ascii_only, indent=indent)

    objects = [written(*call) for call in wanted]
    tagged = "\n".join(f"<tool_call>\n{written}\n</tool_call>" for written in objects)
    assert calls(HERMES, tagged) == wanted
    assert calls(QWEN_CODER, tagged) == wanted
    assert calls(HERMES, "".join(f"<tool_call>{written}</tool_call>" for written in objects)) == wanted
    assert calls(HERMES, tagged.removesuffix("\n</tool_call>")) == wanted
    assert calls(LLAMA, "; ".join(objects)) == wanted
    assert calls(LLAMA, "<|python_tag|>" + ";".join(objects)) == wanted
    assert calls(MISTRAL, f"[TOOL_CALLS] [{', '.join(objects)}]") == wanted


@given(json_calls, st.sampled_from(["", "[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]", " "]))
def test_named_mistral_calls_are_read_back(wanted: list[tuple[str, Any]], between: str) -> None:
    text = "".join(f"[TOOL_CALLS]{name}{between}{json.dumps(arguments)}" for name, arguments in wanted)
    for style in (MISTRAL, MISTRAL_NAMED):
        assert calls(style, text) == wanted


@given(keyword_calls, st.sampled_from([repr, json.dumps]), st.sampled_from([", ", ",", " ,\n "]))
def test_python_calls_are_read_back(wanted: list[tuple[str, Any]], write: Any, comma: str) -> None:
    def written(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({comma.join(f'{key}={write(value)}' for key, value in arguments.items())})"

    written_calls = [written(*call) for call in wanted]
    assert calls(PYTHONIC, f"[{comma.join(written_calls)}]") == wanted
    lines = "\n".join(written_calls)
    assert calls(PYTHONIC, f"<function_calls>\n{lines}\n</function_calls>") == wanted
    assert calls(PYTHONIC, f"<|python_start|>[{comma.join(written_calls)}]<|python_end|>") == wanted


@given(st.lists(st.dictionaries(keywords, st.text(characters), max_size=3), min_size=1, max_size=3))
def test_element_calls_are_read_back(wanted: list[dict[str, str]]) -> None:
    def written(arguments: dict[str, str]) -> str:
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function=now>\n{parameters}</function>\n</tool_call>"

    assert calls(QWEN_CODER, "\n".join(map(written, wanted))) == [("now", arguments) for arguments in wanted]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("city", "3", "3"),
        ("city", ' two\n\n"lines" ', ' two\n\n"lines" '),
        ("days", "3", 3),
        ("days", "three", "three"),
        ("note", "null", None),
        ("note", "3", "3"),
        ("note", " null and void", " null and void"),
        ("size", "True", True),
        ("size", "2.5", 2.5),
        ("scale", "1", 1),
        ("more", "{'a': [None]}", {"a": [None]}),
        ("more", '{"a": "two\nlines"}', {"a": "two\nlines"}),
        ("unit", " C", "C"),
        ("unit", "3", 3),
        ("unit", "null", None),
        ("unit", "X ", "X "),
        ("unknown", "3", "3"),
    ],
)
def test_the_schema_tells_what_an_element_holds(parameter: str, text: str, value: Any) -> None:
    for written in (f"\n{text}\n", text):
        call = f"<function=get_weather><parameter={parameter}>{written}</parameter></function>"
        assert calls(QWEN_CODER, f"<tool_call>{call}</tool_call>") == calls(QWEN_CODER, call)
        assert calls(QWEN_CODER, call) == [("get_weather", {parameter: value})]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 3},
        {"properties": {"a": 3}},
        {"properties": {"a": {"type": 3, "anyOf": 3, "oneOf": {}, "enum": 3}}},
        {"properties": {"a": {"type": [["string"], 3], "anyOf": [3, {"type": None}]}}},
    ],
)
def test_schemas_that_are_none_tell_nothing(schema: dict[str, Any]) -> None:
    parser = AnswerParser(None, QWEN_CODER, {"f": schema})
    (call,) = parser.parse("<function=f><parameter=a>3</parameter></function>").tool_calls
    assert call.arguments == '{"a": "3"}'


CALL = '{"name": "now", "arguments": {"a": "it\'s } {"}}'
ARGUMENTS = '{"a": "it\'s } {"}'
SLIPS = [
    # text, content, arguments of the calls to now
    (f"<tool_call>{CALL}}}\n</tool_call>", "", [ARGUMENTS]),
    (f"<tool_call>{CALL[:-1]}\n</tool_call>", "", [ARGUMENTS]),
    (f"<tool_call>{CALL}</tool_", "", [ARGUMENTS]),
    (f"<tool_call>{CALL}\n{CALL}</tool_call>", "", [ARGUMENTS, ARGUMENTS]),
    (f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [ARGUMENTS, ARGUMENTS]),
    (f"<tool_call>{CALL}</tool_call>\n\n<tool_call>{CALL}</tool_call>\n", "", [ARGUMENTS, ARGUMENTS]),
    (f"Yes.\n<tool_call>{CALL}</tool_call> Done.", "Yes.\n Done.", [ARGUMENTS]),
    (f"<tool_call>{CALL} no </tool_call>", " no </tool_call>", [ARGUMENTS]),
    (f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", [ARGUMENTS]),
    ('<tool_call>{"name": "now"}</tool_call>', "", ["{}"]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", ["{}"]),
    ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", ["{}"]),
    ('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "now"}</tool_call>', "", ['{"a": 1}']),
    ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ['{"a": 1}']),
    ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', "", ["[1]"]),
    ('<tool_call>{"name": "now", "name": "f", "arguments": {}, "parameters": {"a": 1}}</tool_call>', "", ["{}"]),
    ('<tool_call>{"name": "now", "arguments": {"a": "two\nlines"}}</tool_call>', "", ['{"a": "two\\nlines"}']),
    ('<tool_call>{"name": "now", "arguments": {"a": "lo', "", ['{"a": "lo']),
    ('<tool_call>{"name": "now", "arguments": {"a": ]}}</tool_call>', "]}}</tool_call>", ['{"a": ']),
]


@pytest.mark.parametrize(("text", "content", "arguments"), SLIPS)
def test_slips_of_the_model_cost_no_call(text: str, content: str, arguments: list[str]) -> None:
    answer = parse(HERMES, text)
    assert answer.content == content
    assert [call.arguments for call in answer.tool_calls] == arguments
    assert {call.name for call in answer.tool_calls} == {"now"}


NO_CALLS = [
    (HERMES, "The `<tool_call>` tag begins a call, {} and </tool_call>."),
    (HERMES, "<tool_call>\nnow()\n</tool_call>"),
    (HERMES, '<tool_call>{"name": now}</tool_call>'),
    (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": oops}</tool_call>'),
    (HERMES, '<tool_call>{"name": "now", "arguments": [NaN]}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (HERMES, "<tool_call>" + '{"name": ' + "[" * 5000),
    (HERMES, '<tool_call>{"name": "now", "arguments": ' + "[" * 100_000 + "]" * 100_000),
    (LLAMA, '{"name": "Alice", "age": 3}'),
    (LLAMA, '{"name": "unknown", "parameters": {}}'),
    (LLAMA, "def f(): return {1: {}}"),
    (LLAMA, "<|python_tag|>print(3)"),
    (MISTRAL, "[TOOL_CALLS] none"),
    (MISTRAL, "[TOOL_CALLS]now{3"[:-2]),
    (MISTRAL, "[TOOL_CALLS][now]"),
    (PYTHONIC, "see [1], [now](url), [x for x in y] and [unknown()]"),
    (PYTHONIC, "[now(3)]"),
    (PYTHONIC, "[now(a=b)]"),
    (PYTHONIC, "[now(a=__import__('os'))]"),
    (PYTHONIC, "[now(a={1, 2})]"),
    (PYTHONIC, "[now(a=1e999999j)]"),
    (PYTHONIC, "[now(a=b'x')]"),
    (PYTHONIC, '[now(a="\\ud800\'")]'[:-2] + " 'x')]"),
    (PYTHONIC, "[now(a=" + "(" * 20_000 + ")" * 20_000 + ")]"),
    (PYTHONIC, '[now(a="open'),
    (PYTHONIC, "<function_calls>3</function_calls>"),
    (QWEN_CODER, "<function=unknown></function>"),
    (QWEN_CODER, "<tool_call><function=now"),
    (QWEN_CODER, "<tool_call><function=now> text"),
    (QWEN_CODER, "<tool_call><function=now><parameter=></parameter></function>"),
]


@pytest.mark.parametrize(("style", "text"), NO_CALLS)
def test_what_is_no_call_is_content(style: ToolStyle, text: str) -> None:
    answer = parse(style, text)
    assert answer.tool_calls == []
    assert answer.content == text


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (LLAMA, '<|python_tag|>{"type": "function", "name": "unknown", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS]unknown{}"),
        (PYTHONIC, "<|python_tag|>[unknown()]"),
        (QWEN_CODER, "<tool_call><function=unknown></function></tool_call>"),
    ],
)
def test_behind_a_marker_unknown_functions_are_called(style: ToolStyle, text: str) -> None:
    assert calls(style, text) == [("unknown", {})]


CUT = [
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "\\'),
    (HERMES, '<tool_call>{"name": "n\\u006fw", "arguments": {"a": "\\"}'),
    (PYTHONIC, '[now(a=\'\\\'\', b="""\\""""), now(a=\'\\'),
    (QWEN_CODER, "<tool_call><function=get_weather><parameter=days>3"),
    (QWEN_CODER, "<tool_call><function=get_weather><parameter=city>Os"),
]


@pytest.mark.parametrize(("style", "text"), [*CUT, *NO_CALLS, *((HERMES, slip[0]) for slip in SLIPS)])
def test_each_character_alone_gives_the_same_answer(style: ToolStyle, text: str) -> None:
    text = text[:2000]
    style = style._replace(make_id=lambda: "id")
    parser = AnswerParser(None, style, FUNCTIONS)
    streamed = Answer()
    for character in text:
        streamed.add(parser.push(character))
    streamed.add(parser.push("", ended=True))
    assert streamed == AnswerParser(None, style, FUNCTIONS).parse(text)


@pytest.mark.parametrize(
    ("style", "before", "arguments", "after"),
    [
        (HERMES, '<tool_call>\n{"name": "now", "arguments": ', ARGUMENTS, "}\n</tool_call>"),
        (LLAMA, '{"name": "now", "parameters": ', ARGUMENTS, "}"),
        (MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": ', ARGUMENTS, "}]"),
        (MISTRAL_NAMED, "[TOOL_CALLS]now[ARGS]", ARGUMENTS, ""),
    ],
)
def test_arguments_stream_as_they_come(style: ToolStyle, before: str, arguments: str, after: str) -> None:
    parser = AnswerParser(None, style, FUNCTIONS)
    assert not parser.push(before).content
    for character in arguments:
        (piece,) = parser.push(character).tool_calls
        assert piece.arguments == character
    assert not parser.push(after)
    assert not parser.push("", ended=True)


def test_python_arguments_stream_one_by_one() -> None:
    parser = AnswerParser(None, PYTHONIC, FUNCTIONS)
    pieces = ["[now(a='x'", ", b=", "2", ")", "]"]
    streamed = ["".join(piece.arguments for piece in parser.push(piece).tool_calls) for piece in pieces]
    assert streamed == ["", '{"a": "x"', "", ', "b": 2}', ""]


def test_text_in_elements_streams_as_it_comes() -> None:
    parser = AnswerParser(None, QWEN_CODER, FUNCTIONS)
    pieces = ["<tool_call><function=now><parameter=a>\n", 'say "', "hi\n", "x", "\n", "</para", "meter>", "</function>"]
    streamed = ["".join(piece.arguments for piece in parser.push(piece).tool_calls) for piece in pieces]
    assert streamed == ['{"a": "', 'say \\"', "hi", "\\nx", "", "", '"', "}"]


@pytest.mark.parametrize("style", TOOL_STYLES.values(), ids=TOOL_STYLES)
def test_ids_differ_and_are_of_the_style(style: ToolStyle) -> None:
    ids = {style.make_id() for _ in range(100)}
    assert len(ids) == 100
    if style in (MISTRAL, MISTRAL_NAMED):
        assert all(len(made) == 9 and made.isalnum() for made in ids)


@pytest.mark.parametrize("style", TOOL_STYLES.values(), ids=TOOL_STYLES)
def test_no_marker_begins_another(style: ToolStyle) -> None:
    for markers in (style.opening + style.bare, style.closing):
        assert not any(one != other and one.startswith(other) for one in markers for other in markers)


LOOP = "{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}"


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (LOOP + '{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}" }}', HERMES),
        (
            LOOP + '{{ \'format {"name": function name, "parameters": dictionary of argument name and its value}\' }}',
            LLAMA,
        ),
        (LOOP + "{{ '[TOOL_CALLS] [' }}", MISTRAL),
        (LOOP + "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", MISTRAL_NAMED),
        (LOOP + "{{ 'in the format [func_name1(params_name1=params_value1...), func_name2(params)]' }}", PYTHONIC),
        (LOOP + "<function_calls>", PYTHONIC_TAGGED),
        (LOOP + "{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' }}", QWEN_CODER),
    ],
)
def test_the_template_teaches_the_style(template: str, style: ToolStyle) -> None:
    assert style_of(template).knows_tools
    assert style_of(template).tools is style


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        LOOP + "{{ '<|tool_call|>' }}",
        LOOP + "{{ '<tool_call>' + name + '<arg_key>' }}",
        "{# for tools see <tool_call> #}",
    ],
)
def test_other_templates_know_no_tools_and_get_the_hermes_style(template: str) -> None:
    assert not style_of(template).knows_tools
    assert style_of(template).tools is HERMES
