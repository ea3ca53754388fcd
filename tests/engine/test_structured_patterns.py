"""Patterns of strings in a schema, and regular expressions, against Python's `re`."""

import functools
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.sampling import StructuredOutput
from tests.engine.tiny_tokenizers import as_tokenizer, byte_level_vocabulary

pytest.importorskip("xgrammar")

import xgrammar

from engine.structured.compiler import Compiler

WORDS = ["".join(parts) for count in range(6) for parts in itertools.product("ab1", repeat=count)]
WORDS += ["".join(parts) for count in range(1, 4) for parts in itertools.product("ab1-?. é", repeat=count)]


@functools.cache
def compiler() -> Compiler:
    tokenizer = as_tokenizer(byte_level_vocabulary())
    return Compiler(tokenizer, tokenizer.vocab_size, [])


def in_schema(pattern: str) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps({"type": "string", "pattern": pattern}))


def wrongly_judged(pattern: str, kind: str) -> list[str]:
    """Words that the language holds and the pattern does not match, or the other way round."""
    structured = in_schema(pattern) if kind == "schema" else StructuredOutput("regex", pattern)
    try:
        compiled = compiler().compile(structured).compiled
    except ValueError as error:
        if "no text belongs to it" not in str(error):
            raise
        return [word for word in WORDS if word and re.fullmatch(pattern, word, re.ASCII)]
    wrong = []
    for word in WORDS:
        matcher = xgrammar.GrammarMatcher(compiled)
        accepted = matcher.accept_string(f'"{word}"' if kind == "schema" else word) and matcher.is_completed()
        if accepted != bool(re.fullmatch(pattern, word, re.ASCII)):
            wrong.append(word)
    return wrong


ATOMS = ["a", "b", "1", "-", r"\?", "ab", "é", ".", "[ab]", "[^a]", "[a-c1]", r"\d", r"\w", r"\D", r"\s", r"[^\d-]"]
COUNTS = ["?", "*", "+", "{0}", "{1}", "{2}", "{0,1}", "{0,2}", "{1,3}", "{1,}", "{2,}"]
LAZY = st.sampled_from(["", "", "?"])
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner | st.just(""), min_size=1, max_size=4).map(lambda cases: f"(?:{'|'.join(cases)})"),
        st.lists(inner, min_size=2, max_size=3).map(lambda cases: f"({'|'.join(cases)})"),
        st.builds(lambda each, count, lazy: f"(?:{each}){count}{lazy}", inner, st.sampled_from(COUNTS), LAZY),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", ["schema", "regex"])
@settings(max_examples=150, deadline=None)
@given(pattern=PATTERNS, anchored=st.booleans())
def test_a_pattern_lets_through_what_it_matches_and_nothing_else(kind, pattern, anchored):
    assert wrongly_judged(f"^(?:{pattern})$" if anchored else pattern, kind) == []


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^v?\d+\.\d+(?:-[a-z]+)?$", ["1.2", "v10.0-rc"], ["1.112ltemklorm", "1.2-"]),
        (r"^P(?:\d+D)?(?:T(?:\d+H)?)?$", ["P", "P3DT4H"], ["P3881", "PT4"]),
        (r"^\d{3}-\d{4}(?: x\d+)?$", ["147-1359", "147-1359 x2"], ["147-1359950386", "147-1359 x"]),
        (r"^[a-z]+(?:\?[a-z]+=\d+)?$", ["user", "user?a=1"], ["user1"]),
        ("^(?:-|[ab]|[ab]{0,2})$", ["", "-", "ab"], ["aba", "--"]),
        (r"\u{61}?b\x31?", ["ab", "b1"], ["aab", "b11"]),
        ('^["a]+$', ["aa"], ["b"]),
    ],
)
def test_optional_groups_and_shared_beginnings(pattern, good, bad):
    compiled = compiler().compile(in_schema(pattern)).compiled
    for text in good + bad:
        matcher = xgrammar.GrammarMatcher(compiled)
        assert (matcher.accept_string(f'"{text}"') and matcher.is_completed()) == (text in good), text


@pytest.mark.parametrize("kind", ["schema", "regex"])
@pytest.mark.parametrize(
    "pattern",
    ["^(?!a)[ab]$", r"^(?=.*\d)[a-z\d]{3}$", "(?<=a)b", "a(?<!b)", "(?i:a)", "(?>a)", "a++", "(?P<n>a)", "*a"],
)
def test_what_is_not_enforced_is_refused(pattern, kind):
    with pytest.raises(ValueError, match="pattern"):
        compiler().compile(in_schema(pattern) if kind == "schema" else StructuredOutput("regex", pattern))


@pytest.mark.parametrize("pattern", ['a"|ab', r"a\\b", r"a\n?", r"[\"\\]b|a", r"\x0a|a", r"\u0022"])
def test_what_json_writes_with_a_backslash_is_refused_in_a_schema(pattern):
    with pytest.raises(ValueError, match="backslash"):
        compiler().compile(in_schema(pattern))
