"""Schemas of functions that are not strict: they are tried, and what cannot be enforced goes by and is named."""

import functools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.sampling import StructuredOutput
from engine.structured.json_schema import modern
from engine.structured.loose_schema import loosened
from tests.engine.tiny_tokenizers import as_tokenizer, byte_level_vocabulary

pytest.importorskip("xgrammar")

import xgrammar

from engine.structured.compiler import Compiler


@functools.cache
def compiler() -> Compiler:
    tokenizer = as_tokenizer(byte_level_vocabulary())
    return Compiler(tokenizer, tokenizer.vocab_size, [])


def accepts(schema: Any, value: Any) -> bool:
    """Of the language of arguments with this schema, which is tried."""
    node = {"type": "json_schema", "json_schema": schema, "may_loosen": True}
    structured = StructuredOutput("structural_tag", json.dumps({"type": "structural_tag", "format": node}))
    matcher = xgrammar.GrammarMatcher(compiler().compile(structured).compiled)
    return bool(matcher.accept_string(json.dumps(value)) and matcher.is_completed())


def parameters(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


FETCH = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "format": "uri", "minLength": 1},
        "max_length": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000000, "default": 5000},
        "raw": {"type": "boolean", "default": False},
    },
    "required": ["url"],
    "title": "Fetch",
}
EMAIL = r"^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"
DEFS = {"$defs": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "named", "good", "bad"),
    [
        (FETCH, [], {"url": "http://a.b", "max_length": 5}, {"url": 5}),
        (parameters(u={"type": "string", "format": "uri", "maxLength": 2083}), ["u.maxLength"], {"u": "a:b"}, {"u": 1}),
        (
            parameters(a={"type": "array", "uniqueItems": True, "items": {"type": "integer"}}),
            ["a.uniqueItems"],
            {"a": [1]},
            {"a": ["x"]},
        ),
        (parameters(a={"anyOf": [{"not": {}}, {"type": "string"}]}), [], {"a": "x"}, {"a": 1}),
        (
            parameters(
                a={"type": "array", "items": [{"type": "string"}, {"type": "number"}], "additionalItems": False}
            ),
            [],
            {"a": ["x", 1]},
            {"a": [1, "x"]},
        ),
        (
            parameters(
                a={"type": "array", "minItems": 2, "maxItems": 2, "items": [{"type": "string"}, {"type": "number"}]}
            ),
            [],
            {"a": ["x", 1]},
            {"a": ["x"]},
        ),
        (
            parameters(e={"type": "string", "format": "email", "pattern": EMAIL}),
            ["e.pattern"],
            {"e": "a@b.de"},
            {"e": 1},
        ),
        (
            parameters(e={"type": "string", "pattern": "^[a-z]+$", "maxLength": 9}),
            ["e.maxLength"],
            {"e": "abc"},
            {"e": "1"},
        ),
        ({"type": "object", "properties": None}, ["properties"], {"a": 1}, [1]),
        (
            parameters(a={"type": "any"}, b={"type": "dict"}, c={"type": "str"}),
            ["a.type", "b.type", "c.type"],
            {"a": 1, "b": {"x": 1}, "c": "y"},
            {"a": 1, "b": 2},
        ),
        (
            parameters(a={"$ref": "https://example.com/x.json"}, b={"$ref": "#/$defs/missing"}),
            ["a.$ref", "b.$ref"],
            {"a": 1, "b": 2},
            5,
        ),
        ({**parameters(a={"$ref": "#/$defs/a"}), **DEFS}, [], {"a": 1}, {"a": "x"}),
        (
            {**parameters(a={"type": "string"}), "dependentRequired": {"a": ["b"]}},
            ["dependentRequired"],
            {"a": "x"},
            {"a": 1},
        ),
        (parameters(n={"type": "string", "enum": [1, 2]}), ["n.type"], {"n": 2}, {"n": 3}),
        (parameters(p={"type": "number", "multipleOf": 0.01}), ["p.multipleOf"], {"p": 0.5}, {"p": "x"}),
        (
            {
                **parameters(a={"type": "string"}, b={"type": "string"}),
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            ["anyOf"],
            {"a": "x"},
            {"a": 1},
        ),
        ({**parameters(a={"type": "string"}), "required": ["a", "b"]}, ["required"], {"a": "x"}, {}),
        (
            {"allOf": [parameters(a={"type": "string"}), {**parameters(b={"type": "integer"}), "required": ["b"]}]},
            [],
            {"a": "x", "b": 1},
            {"a": "x"},
        ),
        (
            {"type": "object", "properties": {"a": {"type": "string"}}, "if": {}, "then": {}, "not": {"type": "null"}},
            ["if", "then", "not"],
            {"a": "x"},
            {"a": 1},
        ),
        (
            {**parameters(a={"$ref": "#/$defs/a"}), "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            [],
            {"anything": 1},
            5,
        ),
        (parameters(a={"type": "integer", "minimum": 5, "maximum": 1}), [], {"a": 3}, 5),
        (
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}},
            ["parameters"],
            {"x": 1},
            5,
        ),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_named_and_the_rest_holds(schema, named, good, bad):
    passed_over: list[str] = []
    loose = loosened(schema, passed_over, "f")
    assert passed_over == [f"f: {name}" for name in named]
    assert accepts(loose, good)
    assert not accepts(loose, bad)


VALUES = (
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["a", "string", "object", "#/$defs/x", "^a+$"])
)
KEYWORDS = st.sampled_from(
    [
        *("type", "properties", "required", "items", "anyOf", "allOf", "oneOf", "enum", "const", "$ref", "not", "if"),
        *(
            "minLength",
            "maxLength",
            "pattern",
            "format",
            "minimum",
            "multipleOf",
            "uniqueItems",
            "additionalProperties",
        ),
        *("prefixItems", "additionalItems", "minItems", "patternProperties", "propertyNames", "minProperties", "$defs"),
    ]
)
TYPED = st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "array", "object", "null", "dict"])})
JUNK = st.recursive(
    VALUES | TYPED,
    lambda inner: st.one_of(
        st.dictionaries(KEYWORDS, inner, max_size=5),
        st.builds(lambda typed, more: {**more, **typed}, TYPED, st.dictionaries(KEYWORDS, inner, max_size=4)),
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=25,
)


@settings(max_examples=200, deadline=None)
@given(schema=st.dictionaries(KEYWORDS, JUNK, max_size=6))
def test_any_schema_can_be_tried(schema):
    accepts({"type": "object", **loosened(schema, [], "f")}, {})


def test_many_required_names_take_no_time():
    names = [[f"{letter}{index}" for index in range(12_000)] for letter in "ab"]
    start = time.thread_time()
    merged = modern({"type": "object", "allOf": [{"required": each} for each in names]})
    assert time.thread_time() - start < 1
    assert merged == {"type": "object", "required": [*names[0], *names[1]]}
