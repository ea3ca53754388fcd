"""Languages without a model: which tokens they allow, and what random walks through them write."""

import itertools
import json
import re

import numpy as np
import pytest

from configs.sampling import StructuredOutput
from tests.engine.tiny_tokenizers import as_tokenizer, byte_level_vocabulary

pytest.importorskip("xgrammar")

from engine.structured.compiler import Compiler
from engine.structured.language import Matcher


def allowed_ids(matcher: Matcher, vocab_size: int) -> set[int]:
    flags = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
    assert not flags[vocab_size:].any()
    return set(np.flatnonzero(flags).tolist())


ALPHABET = ["a", "b", "e", "s", " ", "the", "she", "lls", "é", "\n", "."]


def words(most: int) -> list[str]:
    return ["".join(parts) for count in range(most + 1) for parts in itertools.product(ALPHABET, repeat=count)]


LANGUAGES = [
    StructuredOutput("regex", pattern)
    for pattern in (
        "(the|she)( the| shells){0,2}",
        "[a-e]{1,3}",
        "s?he.",
        "^(a|b)+é$",
        "[^a\\n]{2}",
        "(a|ab)(e|be)?",
        "she(lls)?|the\\.",
    )
] + [
    StructuredOutput("choice", json.dumps(texts))
    for texts in (["the", "she", "shells", "the shells"], ["a", "ab", "abe"], ["é", "\n", ". the"])
]


@pytest.mark.parametrize("structured", LANGUAGES, ids=lambda each: each.source)
def test_allowed_tokens_equal_brute_force(structured):
    """The language's words over a small alphabet, and the tokens over the same: which token leads to a word."""
    tokenizer = as_tokenizer(byte_level_vocabulary())
    eos = tokenizer.eos_token_id
    if structured.kind == "choice":
        language = json.loads(structured.source)
    else:
        language = [word for word in words(4) if re.fullmatch(structured.source, word)]
    language = {word.encode() for word in language}
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    letters = set("".join(ALPHABET).encode())
    compiled = Compiler(tokenizer, tokenizer.vocab_size, [eos]).compile(structured)
    todo, seen = [(b"", ())], 0
    longest = max(map(len, language)) if structured.kind == "choice" else 3
    while todo and seen < 150:
        text, token_ids = todo.pop(0)
        seen += 1
        matcher = Matcher(compiled, {eos}, token_ids)
        allowed = allowed_ids(matcher, tokenizer.vocab_size)
        assert (eos in allowed) == (text in language)
        expected = {
            token_id
            for token_id, piece in enumerate(pieces)
            if piece
            and token_id not in tokenizer.special_ids
            and any(word.startswith(text + piece) for word in language)
        }
        within = {token_id for token_id in allowed - {eos} if set(pieces[token_id]) <= letters}
        if structured.kind == "choice":
            assert within == allowed - {eos} == expected
            assert matcher.is_complete == (text in language and not expected)
        else:  # the words are only some of the language's
            assert expected <= within
            for token_id in within - expected:
                assert _may_go_on(structured.source, (text + pieces[token_id]).decode(errors="ignore"))
        todo += [
            (text + pieces[each], (*token_ids, each))
            for each in sorted(expected)
            if len(text + pieces[each]) <= longest
        ]


def _may_go_on(pattern: str, text: str) -> bool:
    return any(re.fullmatch(pattern, text + rest) for rest in words(3))


def tag(inner: dict) -> StructuredOutput:
    return StructuredOutput("structural_tag", json.dumps({"format": inner}))


def accepts(language, tokenizer, text: str) -> bool:
    matcher = Matcher(language, ())
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id not in allowed_ids(matcher, tokenizer.vocab_size):
            return False
        matcher.append(token_id)
    return matcher._matcher.is_completed()


CALL = {
    "type": "tag",
    "begin": '<|start|>\n{"name": "f", "arguments": ',
    "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    "end": "}\n</call>",
}
A_CALL = '<|start|>\n{"name": "f", "arguments": {"x": 1}}\n</call>'
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}


@pytest.mark.parametrize(
    ("inner", "good", "bad"),
    [
        (
            {"type": "triggered_tags", "triggers": ["<|start|>"], "tags": [CALL]},
            ["", "free text", A_CALL, f"text {A_CALL} more {A_CALL}"],
            ["<|start|>other", '<|start|>\n{"name": "f", "arguments": {"x": "1"}}\n</call>'],
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": "\n", "at_least_one": True},
            [A_CALL, f"{A_CALL}\n{A_CALL}"],
            ["", "text", f"{A_CALL} {A_CALL}"],
        ),
        (CALL, [A_CALL], ["", f"{A_CALL}\n{A_CALL}"]),
        (
            {"type": "sequence", "elements": [THINK, {"type": "json_schema", "json_schema": {"type": "boolean"}}]},
            ['<think>{"any" thing</think>true'],
            ["true", "<think>no end", "<think></think>1"],
        ),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": ["<|start|>"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": {"type": "token", "token": "<|start|>"},
                        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                        "end": "",
                    }
                ],
            },
            ["free", "a <|start|>12"],
            ["<|start|>x"],
        ),
    ],
)
def test_a_structural_tag_may_spell_special_tokens(inner, good, bad):
    tokenizer = as_tokenizer(byte_level_vocabulary())
    compiler = Compiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    start = tokenizer.token_id("<|start|>")
    assert start in tokenizer.special_ids
    language = compiler.compile(tag(inner))
    assert [text for text in good if not accepts(language, tokenizer, text)] == []
    assert [text for text in bad if accepts(language, tokenizer, text)] == []


def test_special_tokens_are_no_text():
    tokenizer = as_tokenizer(byte_level_vocabulary())
    compiler = Compiler(tokenizer, tokenizer.vocab_size + 5, [tokenizer.eos_token_id])
    hidden = {*tokenizer.special_ids, *range(tokenizer.vocab_size, tokenizer.vocab_size + 5)}
    for structured in (
        StructuredOutput("regex", "[^a]*"),
        StructuredOutput("grammar", "root ::= [^a]*"),
        tag({"type": "any_text"}),
        tag({"type": "any_text", "excludes": ["<end>"]}),
        tag({"type": "any_tokens"}),
    ):
        allowed = allowed_ids(Matcher(compiler.compile(structured), ()), tokenizer.vocab_size + 5)
        assert allowed
        assert not allowed & hidden


def test_spaces_in_json_are_bounded():
    tokenizer = as_tokenizer(byte_level_vocabulary())
    language = Compiler(tokenizer, tokenizer.vocab_size, []).compile(StructuredOutput("json_object"))
    assert accepts(language, tokenizer, '{\n    "a": [\n        1\n    ]\n}')
    assert not accepts(language, tokenizer, "{" + " " * 21 + "}")


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}


SCHEMAS: list[dict] = [
    PERSON,
    {"type": "object"},
    {"type": "array"},
    {"type": "array", "items": {"type": "number", "minimum": -1.5, "maximum": 2.25}, "minItems": 2, "maxItems": 4},
    {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"type": "boolean"}],
        "items": {"type": "string", "maxLength": 3},
    },
    {"type": "array", "items": [{"type": "null"}, {"enum": [1, 2]}], "additionalItems": False, "minItems": 1},
    {"type": "array", "items": [{"type": "boolean"}], "additionalItems": {"type": "null"}},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^é+[^a]{1,4}$"},
    {"type": "string", "format": "uuid"},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 20},
    {"type": "integer", "multipleOf": 7},
    {"type": ["string", "null", "integer"], "minimum": 5, "maxLength": 2},
    {"enum": [1, 'x\n"', None, {"a": [True]}, "é"]},
    {"anyOf": [{"const": 5}, {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}]},
    {"type": "object", "patternProperties": {"^[a-c]{2}$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"enum": ["k", "l"]}, "maxProperties": 1},
    {"type": "object", "properties": {"a": {}, "b": {"type": "null"}}, "minProperties": 1, "required": ["b"]},
    {
        "$defs": {
            "n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
        },
        "$ref": "#/$defs/n",
    },
    {"title": "T", "default": 3, "x-own": 1, "allOf": [{"type": "boolean"}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
        "allOf": [{"properties": {"b": {"type": "boolean"}}, "required": ["b"]}],
    },
    {"anyOf": [{"not": {}}, {"type": "integer", "minimum": 3}, False]},
    {"type": "string", "format": "uuid", "minLength": 1, "maxLength": 40},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_random_walks_validate(schema):
    jsonschema = pytest.importorskip("jsonschema_rs")
    tokenizer = as_tokenizer(byte_level_vocabulary())
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    weights = np.array([20.0 if piece in (b'"', b"}", b"]") else 1.0 if piece.strip() else 0.1 for piece in pieces])
    draft = jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else jsonschema.Draft202012Validator
    validator = draft(schema, validate_formats=True)
    compiler = Compiler(tokenizer, tokenizer.vocab_size, [])
    language = compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
    rng = np.random.default_rng(0)
    complete = 0
    for _ in range(25):
        matcher, text = Matcher(language, ()), b""
        while not (matcher.is_complete or len(text) > 500 or (matcher._matcher.is_completed() and rng.random() < 0.3)):
            allowed = np.array(sorted(allowed_ids(matcher, tokenizer.vocab_size)))
            token_id = int(rng.choice(allowed, p=weights[allowed] / weights[allowed].sum()))
            matcher.append(token_id)
            text += pieces[token_id]
        if matcher._matcher.is_completed():
            complete += 1
            validator.validate(json.loads(text))
    assert complete > 3


LARK = """
?start: sum
?sum: product | sum "+" product -> add
?product: atom | product "*" atom  // binds closer
?atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]/ "0"~0..2
%ignore " "
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "yes" | "no"', ["yes", "no"], ["", "maybe"]),
        ('%llguidance {}\n\nstart: "yes" | "no"i', ["yes", "NO"], ["YES"]),
        (LARK, ["1+2", "100 * (3 + 40)"], ["1+", "1000"]),
        ('start: X* ("a" | "b")?\nX: /x|xy{1,2}/\n', ["", "xxyyb", "a"], ["xyyy", "ab"]),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_lark_grammars(grammar, good, bad, is_nested):
    tokenizer = as_tokenizer(byte_level_vocabulary())
    compiler = Compiler(tokenizer, tokenizer.vocab_size, [])
    structured = StructuredOutput("grammar", grammar)
    language = compiler.compile(tag({"type": "grammar", "grammar": grammar}) if is_nested else structured)
    assert [text for text in good if not accepts(language, tokenizer, text)] == []
    assert [text for text in bad if accepts(language, tokenizer, text)] == []


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('%llguidance {}\nstart: %json {"type": "string", "not": {}}', "%json"),
        ('start: a[capture]\na: "x"', "capture"),
        (r"start: /\Ax/", r"\\A"),
        ("start: /(?=x)x/", "Lookahead"),
        ("start: missing", "missing"),
        ('%llguidance {"no_forcing": true}\nstart: "x"', "%llguidance"),
    ],
)
def test_what_a_lark_grammar_may_not_hold_is_named(grammar, named):
    tokenizer = as_tokenizer(byte_level_vocabulary())
    with pytest.raises(ValueError, match=named):
        Compiler(tokenizer, tokenizer.vocab_size, []).compile(StructuredOutput("grammar", grammar))
