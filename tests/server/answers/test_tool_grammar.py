"""The grammars, compiled by xgrammar: what they accept, and that the parser reads back whatever they produce."""

import json
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import xgrammar

from configs.errors import InvalidRequest
from server.answers.grammar import answer_grammar
from server.answers.parser import AnswerParser
from server.answers.styles import HERMES, PYTHONIC, THINK, TOOL_STYLES, ToolStyle

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"$ref": "#/$defs/More"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "$defs": {"More": {"type": "object", "properties": {"a": {"type": ["boolean", "null"]}}, "required": ["a"]}},
}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "optional": OPTIONAL, "now": NOTHING, "anything": None}


def tool(name: str, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], "strict": strict}}


TOOLS = [tool("get_weather", strict=True), tool("optional"), tool("now"), tool("anything")]
LONG_TOKENS = [*(style.trigger for style in TOOL_STYLES.values() if style.trigger), "</think>", "</parameter>", "[now("]
TOKENS = [*(bytes([value]) for value in range(256)), *(token.encode() for token in LONG_TOKENS), b"</s>"]
END = len(TOKENS) - 1


@lru_cache(maxsize=1)
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = xgrammar.TokenizerInfo(TOKENS, xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(vocabulary)


def compiled(style: ToolStyle, tools: list[dict[str, Any]], choice: Any, **kwargs: Any) -> xgrammar.CompiledGrammar:
    structured = answer_grammar(style, tools, is_required=choice == "required", **kwargs)
    assert structured is not None
    assert structured.kind == "structural_tag"
    return compiler().compile_structural_tag(json.loads(structured.source))


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text)) and bool(matcher.is_completed())


def sample(grammar: xgrammar.CompiledGrammar, rng: random.Random) -> str:
    """Some text of the language; tokens that end something are likelier than others."""
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(TOKENS))
    text = b""
    while True:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(TOKENS)]
        allowed = [int(token) for token in np.flatnonzero(bits) if token < 128 or token >= 256]
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.2 or len(text) > 2000):
            return text.decode()
        allowed = [token for token in allowed if token != END]
        weights = [12 if token >= 256 else 8 if chr(token) in '"}])>,' else 1 for token in allowed]
        token = rng.choices(allowed, weights)[0]
        assert matcher.accept_token(token)
        text += TOKENS[token]
        assert len(text) < 20_000


def follows(arguments: str, schema: Any) -> bool:
    """Whether JSON text follows the schema, by xgrammar's own word."""
    return accepts(compiler().compile_json_schema(json.dumps(schema or {"type": "object"})), arguments)


@pytest.mark.parametrize("style", TOOL_STYLES.values(), ids=TOOL_STYLES)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("reasoning", "starts_inside"), [(None, False), (THINK, False), (THINK, True)])
def test_what_the_grammar_allows_is_parsed_into_calls_that_follow_the_schemas(
    style: ToolStyle, choice: str, parallel: bool, reasoning: Any, starts_inside: bool
) -> None:
    about = {"reasoning": reasoning, "starts_inside": starts_inside}
    grammar = compiled(style, TOOLS, choice, parallel=parallel, **about)
    functions = {name: schema or {} for name, schema in SCHEMAS.items()}
    rng = random.Random(3)
    num_calls = []
    for _ in range(16):
        text = sample(grammar, rng)
        answer = AnswerParser(reasoning, style, functions, starts_inside=starts_inside).parse(text)
        num_calls.append(len(answer.tool_calls))
        if choice == "required":
            assert answer.content == ""
        for call in answer.tool_calls:
            followed = SCHEMAS[call.name] if choice == "required" or call.name == "get_weather" else None
            assert follows(call.arguments, followed), text
    assert min(num_calls) >= (choice == "required")
    assert max(num_calls) >= 1
    assert parallel or max(num_calls) == 1


HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "required", "required_once", "auto", "auto_once"),
    [
        ("Hello <tool", False, False, True, True),
        (HERMES_CALL, True, True, True, True),
        (f"{HERMES_CALL}\n{HERMES_NOW}", True, False, True, False),
        (f"Well, {HERMES_CALL}", False, False, True, True),
        (f"{HERMES_CALL} Done.", False, False, True, False),
        (HERMES_CALL.replace('"Oslo"', "3"), False, False, False, False),
        (HERMES_CALL.replace("get_weather", "get_time"), False, False, False, False),
        ("The <tool_call> tag", False, False, False, False),
    ],
)
def test_choice_and_parallel_say_how_many_calls_there_are(
    text: str, required: bool, required_once: bool, auto: bool, auto_once: bool
) -> None:
    assert accepts(compiled(HERMES, TOOLS, "required"), text) == required
    assert accepts(compiled(HERMES, TOOLS, "required", parallel=False), text) == required_once
    assert accepts(compiled(HERMES, TOOLS, "auto"), text) == auto
    assert accepts(compiled(HERMES, TOOLS, "auto", parallel=False), text) == auto_once


def test_one_function_alone_is_called_once() -> None:
    grammar = compiled(HERMES, [tool("now")], "required", parallel=False)
    assert accepts(grammar, HERMES_NOW)
    for text in ("", "Now!", HERMES_CALL, f"{HERMES_NOW}\n{HERMES_NOW}"):
        assert not accepts(grammar, text)


def test_auto_is_free_unless_a_tool_is_strict_or_calls_are_counted() -> None:
    assert answer_grammar(HERMES, [], parallel=False) is None
    assert answer_grammar(HERMES, [tool("now"), tool("optional")]) is None
    lax = HERMES_CALL.replace('"Oslo"', "3")
    assert accepts(compiled(HERMES, [tool("get_weather")], "auto", parallel=False), lax)
    assert not accepts(compiled(HERMES, [tool("get_weather", strict=True)], "auto"), lax)


def test_reasoning_comes_first_and_has_to_end_where_the_prompt_began_it() -> None:
    inside = compiled(HERMES, TOOLS, "required", reasoning=THINK, starts_inside=True)
    assert accepts(inside, f"maybe <tool_call>?\n</think>\n\n{HERMES_CALL}")
    assert not accepts(inside, HERMES_CALL)
    outside = compiled(HERMES, TOOLS, "required", reasoning=THINK)
    assert accepts(outside, f"<think>\nmaybe\n</think>\n\n{HERMES_CALL}")
    assert accepts(outside, HERMES_CALL)
    assert not accepts(outside, f"maybe</think>{HERMES_CALL}")


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        ('get_weather(city="Oslo")', True),
        ('get_weather(city="Oslo", days=3, unit="F")', True),
        ('get_weather(city="Oslo", more={"a": true}), now()', True),
        ("get_weather()", False),
        ("get_weather(days=3)", False),
        ('get_weather(city="Oslo", days="3")', False),
        ("optional()", True),
        ("optional(a=1)", True),
        ("optional(b=true)", True),
        ("optional(a=1, b=true)", True),
        ("optional(b=true, a=1)", False),
        ("optional(, a=1)", False),
        ("now(a=1)", False),
        ('anything(x=[1], y="z")', True),
        ("", False),
    ],
)
def test_keywords_follow_the_schema(call: str, allowed: bool) -> None:
    assert accepts(compiled(PYTHONIC, TOOLS, "required"), f"[{call}]") == allowed


def test_schemas_of_combinations_and_none_are_taken() -> None:
    one = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    schema = {"anyOf": [one, OPTIONAL]}
    tools = [{"type": "function", "function": {"name": "either", "parameters": schema}}]
    grammar = compiled(HERMES, tools, "required")
    for arguments, allowed in (('{"city": "Oslo"}', True), ('{"a": 1}', True), ('{"a": "x"}', False)):
        text = f'<tool_call>\n{{"name": "either", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(grammar, text) == allowed
    grammar = compiled(HERMES, [tool("anything")], "required")
    for arguments, allowed in (('{"x": [1]}', True), ("3", False)):
        text = f'<tool_call>\n{{"name": "anything", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(grammar, text) == allowed


def test_functions_that_are_too_large_are_refused_before_they_are_written_out() -> None:
    large = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 100] * 800}}}
    assert answer_grammar(HERMES, [large], is_required=True) is not None
    with pytest.raises(InvalidRequest) as caught:
        answer_grammar(HERMES, [large, large], is_required=True)
    assert caught.value.param == "tools"
    assert answer_grammar(HERMES, [large, large]) is None
