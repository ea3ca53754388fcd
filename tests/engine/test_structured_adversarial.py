"""Sources that are wrong, huge, deep or cunning end their own request, with the reason, and nothing else."""

import functools
import json
import re
import time

import pytest

from configs.sampling import SamplingParams, StructuredOutput
from tests.engine.core_runs import add, finish, make_core
from tests.engine.tiny_models import write_tiny

pytest.importorskip("xgrammar")

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return make_core(folder)


def answer(core, kind: str, source: str, **params):
    sampling = SamplingParams(structured=StructuredOutput(kind, source), **{"max_tokens": 8, "seed": 0} | params)
    add(core, "x", PROMPT, sampling)
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs[-1]


def nested(count: int, before: str, inner: str, after: str) -> str:
    return before * count + inner + after * count


def schema(**keywords) -> str:
    return json.dumps(keywords)


def objects(**keywords) -> str:
    return schema(type="object", **keywords)


REFUSED = {
    # what is no source at all
    "no JSON": ("json_schema", "{", "not JSON"),
    "NaN": ("json_schema", '{"const": NaN}', "NaN"),
    "surrogate": ("json_schema", '{"const": "\\ud800"}', "JSON"),
    "no schema": ("json_schema", "[1]", "a schema is"),
    "a text": ("json_schema", '"x"', "a schema is"),
    "nothing": ("json_schema", "false", "cannot accept"),
    "unknown type": ("json_schema", schema(type="strng"), "strng"),
    "type of another type": ("json_schema", schema(type=5), "type must be"),
    "type in a list in a list": ("json_schema", schema(type=[["string"]]), "type must be"),
    "no enum": ("json_schema", schema(enum=[]), "enum"),
    "no case": ("json_schema", schema(anyOf=[]), "anyOf"),
    "enum of another type": ("json_schema", schema(type="string", enum=["a", 1]), "not of type"),
    "required number": ("json_schema", objects(required=[1]), "required"),
    "negative count": ("json_schema", schema(type="string", minLength=-1), "minLength"),
    "no choice": ("choice", "[]", "choice"),
    "choice of numbers": ("choice", "[1]", "choice"),
    "choice of nothing": ("choice", '[""]', "no text"),
    "choice of a surrogate": ("choice", '["\\ud800"]', "structural|JSON|surrogate"),
    "open parenthesis": ("regex", "(a", "parenthesis"),
    "closed parenthesis": ("regex", "a)", "closes nothing"),
    "empty pattern": ("regex", "", "no text"),
    "NUL": ("regex", "\0", "null"),
    "empty grammar": ("grammar", "", "root"),
    "unknown rule": ("grammar", "root ::= foo", "foo"),
    "grammar of nothing": ("grammar", "root ::= root", "no text"),
    "grammar in a circle": ("grammar", "root ::= a\na ::= b\nb ::= a", "no text"),
    "tag without format": ("structural_tag", "{}", "ormat"),
    "unknown format": ("structural_tag", '{"format": {"type": "zzz"}}', "zzz"),
    "tag of a wrong schema": (
        "structural_tag",
        '{"format": {"type": "json_schema", "json_schema": {"not": {}}}}',
        "not is not supported",
    ),
    "tag that is a list": ("structural_tag", "[]", "JSON object"),
    # what xgrammar would pass over or read differently
    **{
        keyword: ("json_schema", schema(type="object", properties={"a": {keyword: value}}), keyword)
        for keyword, value in {
            "not": {},
            "if": {},
            "contains": {},
            "uniqueItems": True,
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {},
            "minimum": 3,
            "required": ["a"],
            "patternProperties": {"a": {}},
        }.items()
    },
    "allOf": ("json_schema", schema(allOf=[{"type": "string"}, {"type": "integer"}]), "allOf"),
    "allOf of references": ("json_schema", schema(allOf=[{"$ref": "#"}, {"type": "null"}]), "allOf"),
    "beside a case": ("json_schema", schema(anyOf=[{"type": "object"}], required=["a"]), "required beside anyOf"),
    "beside a reference": ("json_schema", '{"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {}}}', "beside"),
    "length beside pattern": ("json_schema", schema(type="string", pattern="a", maxLength=3), "maxLength beside"),
    "length beside format": ("json_schema", schema(type="string", format="uuid", maxLength=3), "maxLength beside"),
    "multiple": ("json_schema", schema(type="number", multipleOf=0.1), "multipleOf"),
    "multiple in a range": ("json_schema", schema(type="integer", multipleOf=2, minimum=1), "multipleOf"),
    "required but unknown": ("json_schema", objects(required=["a"]), "required names"),
    "two kinds of names": (
        "json_schema",
        objects(properties={"a": {}}, patternProperties={"a": {}}),
        "patternProperties beside properties",
    ),
    "names of a closed object": (
        "json_schema",
        objects(propertyNames={"pattern": "a"}, additionalProperties=False),
        "propertyNames beside additionalProperties",
    ),
    "quote in a pattern": ("json_schema", schema(type="string", pattern='^"$'), "pattern"),
    "foreign reference": ("json_schema", '{"$ref": "http://example.com/a.json"}', r"\$ref"),
    "reference to an unknown place": ("json_schema", '{"$ref": "#/components/a", "components": {"a": {}}}', r"\$ref"),
    "reference to nothing": ("json_schema", '{"$ref": "#/$defs/a"}', r"\$defs"),
    "references in a circle": (
        "json_schema",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
        "Circular",
    ),
    "unsatisfiable": ("json_schema", schema(type="integer", minimum=3, maximum=2), "range"),
    **{
        f"{value} beyond a double": ("json_schema", schema_of % value, "too large")
        for value, schema_of in {
            "1" + "0" * 400: '{"type": "integer", "maximum": %s}',
            "-1e400": '{"type": "number", "minimum": %s}',
            "1e999": '{"const": %s}',
            "9" * 5000: '{"enum": [%s]}',
            "7" * 309: '{"type": "string", "maxLength": %s}',
            "8" * 350: '{"properties": {"a": {"default": %s}}}',
        }.items()
    },
    "beyond 64 bits": ("json_schema", schema(type="integer", minimum=10**30), "limit"),
    "lookahead": ("regex", "(?=a)b", "Lookahead"),
    "backreference": ("regex", r"(a)\1", "Backreference"),
    "word boundary": ("regex", r"\bfoo", "not supported"),
    "start of text": ("regex", r"\Afoo", "not supported"),
    "start inside": ("regex", "a^b", "never match"),
    "end inside": ("regex", "(a$|b)c", "behind a"),
    # what is deep or long
    "arrays in arrays": ("json_schema", nested(10_000, '{"type":"array","items":', "{}", "}"), "nested|deep"),
    "objects in objects": ("json_schema", nested(70, '{"type":"object","properties":{"a":', "{}", "}}"), "nested"),
    "deep constant": ("json_schema", '{"const":' + nested(100_000, "[", "", "]") + "}", "nested|deep|JSON"),
    "deep tag": (
        "structural_tag",
        '{"format":' + nested(5000, '{"type":"optional","content":', '{"type":"any_text"}', "}") + "}",
        "nested|deep",
    ),
    "groups in groups": ("regex", nested(50_000, "(", "a", ")"), "limit|Nest"),
    "groups in a grammar": ("grammar", "root ::= " + nested(50_000, "(", '"a"', ")"), "limit|Nest"),
    "a megabyte": (
        "json_schema",
        objects(properties={f"p{i}": {"description": "x" * 90} for i in range(9000)}),
        "longer",
    ),
    "a megabyte of choices": ("choice", json.dumps(["x" * 1000] * 1000), "longer"),
    "cases in cases": (
        "json_schema",
        json.dumps(functools.reduce(lambda inner, _: {"anyOf": [inner, inner]}, range(15), {"type": "null"})),
        "longer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_the_reason(core, name):
    kind, source, reason = REFUSED[name]
    output = answer(core, kind, source)
    assert (output.finish_reason, output.error_type, output.error_param) == ("error", "InvalidRequest", "structured")
    assert output.error.startswith(f"{kind} cannot be used: ")
    assert re.search(reason, output.error), output.error
    assert len(output.error) < 400
    assert not core.has_work


def branching(count: int) -> str:
    """Each definition refers to the next one twice."""
    references = [{"$ref": f"#/$defs/a{index + 1}"} for index in range(count)]
    cases = {f"a{index}": {"anyOf": [each, {"items": each}]} for index, each in enumerate(references)}
    return json.dumps({"$defs": {**cases, f"a{count}": {"type": "null"}}, "$ref": "#/$defs/a0"})


def chain(count: int) -> str:
    rules = [f"r{index} ::= r{index + 1}" for index in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "a"'])


ANSWERED = {
    "a million items": ("json_schema", schema(type="array", items={}, minItems=10**6, maxItems=10**9)),
    "a million characters": ("json_schema", schema(type="string", minLength=10**5, maxLength=10**6)),
    "a hundred thousand repetitions": ("regex", "[a-z]{1,100000}"),
    "repetitions of repetitions": ("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    "a reference to itself": (
        "json_schema",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}}',
    ),
    "an endless document": (
        "json_schema",
        '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}}',
    ),
    "forty references that branch": ("json_schema", branching(40)),
    "a thousand properties": ("json_schema", objects(properties={f"p{i}": {"type": "null"} for i in range(1000)})),
    "five thousand choices": ("choice", json.dumps([f"choice {i}" for i in range(5000)])),
    "a chain of rules": ("grammar", chain(9000)),
    "left recursion": ("grammar", 'root ::= root "a" | "b"'),
    "nothing in a loop": ("grammar", 'root ::= ("" | "a")* "b"'),
    "an automaton of 2^40 states": ("regex", "(a|b)*a(a|b){40}c"),
    "ignored keywords": ("json_schema", schema(type="null", title="t", format="f", nullable=True, discriminator={})),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_what_is_large_or_recursive_but_sound_is_answered(core, name):
    start = time.monotonic()
    output = answer(core, *ANSWERED[name])
    assert output.finish_reason in ("length", "complete"), output.error
    assert time.monotonic() - start < 8


def test_a_language_with_too_many_readings_fails_its_request_only(core, monkeypatch):
    monkeypatch.setattr("engine.structured.language.MAX_TOKEN_TIME", 0.005)
    ambiguous = 's ::= "a" s "a" | "a" s | s "a" | "a"'
    params = SamplingParams(structured=StructuredOutput("grammar", f"root ::= s\n{ambiguous}"), max_tokens=900)
    add(core, "ambiguous", PROMPT, params)
    add(core, "plain", PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    outputs = finish(core)
    assert outputs["ambiguous"].finish_reason == "error"
    assert "too many ways" in outputs["ambiguous"].error
    assert outputs["ambiguous"].error_type == "InvalidRequest"
    assert outputs["plain"].finish_reason == "length"
