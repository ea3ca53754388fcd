"""Grammars that cost too much: refused at once, or ended in a process of their own, and nobody else notices."""

import json
import os
import signal
import socket
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import CompilerBusy, InvalidRequest
from configs.sampling import StructuredOutput
from configs.settings import EngineConfig
from engine.structured import trial as module
from engine.structured.costs import check_costs, is_cheap
from engine.structured.trial import Trial, TrialProcess
from tests.engine.tiny_models import write_tiny
from tests.engine.tiny_tokenizers import as_tokenizer, byte_level_vocabulary

pytest.importorskip("xgrammar")

from engine.structured.compiler import Compiler

ENDLESS = {"type": "string", "pattern": "(?:(?:[ab]?){99}){90}"}
"""Its automaton takes minutes."""


def structured(schema: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema))


def named(count: int, **keywords: object) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{index}": keywords for index in range(count)}}


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    trials = TrialProcess(EngineConfig(model=str(folder)))
    yield trials
    trials.close()


def alone() -> bool:
    return False


@pytest.mark.timeout(180)
def test_what_takes_too_long_ends_and_the_next_one_compiles(trials):
    assert trials.compile(structured({"type": "string", "format": "email"}), alone).error is None
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match="10 seconds to compile"):
        trials.compile(structured(ENDLESS), alone)
    assert time.monotonic() - start < 13
    start = time.monotonic()
    with pytest.raises(CompilerBusy):
        trials.compile(structured(ENDLESS), lambda: True)
    assert time.monotonic() - start < 5
    result = trials.compile(StructuredOutput("regex", "[^a]{1,9}"), alone)
    assert result.error is None
    assert result.num_bytes > 0
    assert "parenthesis" in trials.compile(StructuredOutput("regex", "(a"), alone).error


@pytest.mark.timeout(180)
def test_a_template_that_was_killed_is_started_again(trials):
    assert trials.compile(StructuredOutput("json_object"), alone).error is None
    os.kill(trials._process.pid, signal.SIGKILL)
    trials._process.wait()
    assert trials.compile(StructuredOutput("json_object"), alone).error is None


def test_a_template_that_cannot_start_is_no_fault_of_the_request(tmp_path):
    trials = TrialProcess(EngineConfig(model=str(tmp_path / "missing")))
    with pytest.raises(CompilerBusy):
        trials.compile(StructuredOutput("json_object"), alone)


@pytest.mark.parametrize("taken", [16 << 20, 2 << 30])
def test_memory_is_bounded(taken):
    ours, theirs = socket.socketpair()
    ours.sendall(msgspec.json.encode(StructuredOutput("json_object")))
    ours.shutdown(socket.SHUT_WR)
    if (pid := os.fork()) == 0:
        try:
            ours.close()
            module._answer(theirs, lambda _: bytes(taken))
        finally:
            os._exit(0)
    theirs.close()
    os.waitpid(pid, 0)
    with ours:
        assert int.from_bytes(ours.recv(4)) == pid
        answer = ours.recv(1 << 16)
    assert bool(answer) == (taken < module.MAX_MEMORY)
    if answer:
        assert msgspec.json.decode(answer, type=Trial).error is None


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        (named(2000, type="string", format="uri"), "200 strings with a format"),
        ({**named(200, type="integer"), "minProperties": 1}, "minProperties or maxProperties"),
        ({**named(2000, type="integer"), "minProperties": 1000}, "minProperties or maxProperties"),
        ({"items": {**named(90, type="null"), "maxProperties": 80}}, "minProperties or maxProperties"),
        (named(5000, type="string"), "2000 properties"),
        ({"type": "array", "items": [named(1001), named(1001)]}, "2000 properties"),
        (named(16, type="integer", multipleOf=1000), "multipleOf"),
        ({"format": {"type": "json_schema", "json_schema": named(300, type="string", format="email")}}, "format"),
    ],
)
def test_bounds_are_told_before_anything_is_compiled(schema, bound):
    tokenizer = as_tokenizer(byte_level_vocabulary())
    kind = "json_schema" if "type" in schema or "items" in schema else "structural_tag"
    start = time.process_time()
    with pytest.raises(ValueError, match=bound):
        Compiler(tokenizer, tokenizer.vocab_size, []).compile(StructuredOutput(kind, json.dumps(schema)))
    assert time.process_time() - start < 1


def test_bounds_leave_what_is_usual():
    check_costs({**named(40, type="string"), "minProperties": 1})
    check_costs({**named(1000, type="string"), "required": [f"p{i}" for i in range(1000)], "minProperties": 1})
    check_costs(named(100, type="string", format="date-time"))


@pytest.mark.parametrize(
    ("source", "cheap"),
    [
        (StructuredOutput("json_object"), True),
        (StructuredOutput("choice", '["a", "b"]'), True),
        (StructuredOutput("regex", r"\d{3}-[a-z]{1,8}(?:x|y)?"), True),
        (StructuredOutput("regex", "[^a]{1,100}"), False),
        (StructuredOutput("regex", "(?:[a-z]{1,20} ){1,40}"), False),
        (StructuredOutput("grammar", 'root ::= "yes" | "no"'), True),
        (StructuredOutput("grammar", 'start: "yes" | "no"'), True),
        (StructuredOutput("grammar", 'start: "a"~1..100000'), False),
        (structured({"type": "string", "pattern": "^[^@]{1,20}@[a-z]+[.][a-z]+$"}), True),
        (structured({"type": "string", "pattern": "^.{1,20}@.{1,20}$"}), False),
        (structured(named(100, type="string", maxLength=9)), True),
        (structured(named(3, type="string", format="date")), True),
        (structured(named(3, type="string", format="uri")), True),
        (structured(named(9, type="string", format="email")), False),
        (structured({**named(3, type="string"), "additionalProperties": True}), True),
        (structured({**named(40, type="string"), "additionalProperties": True}), False),
        (structured({**named(3), "minProperties": 1}), True),
        (structured({**named(17), "minProperties": 1}), False),
        (structured({"properties": 5, "minProperties": 1, "format": [], "pattern": {}}), True),
        (structured({"type": "integer", "multipleOf": 1000}), False),
        (structured(ENDLESS), False),
        (structured({"type": "string", "pattern": "(?:[^a]?b?){60}"}), False),
        (structured({"type": "string", "pattern": "(?:([a-z ]?){8}){8}"}), False),
    ],
)
def test_what_is_cheap(source, cheap):
    assert is_cheap(source) is cheap


@pytest.mark.parametrize("filler", ["\n", " ", "a\n", "start\n", "?", "(", "[", "{1,", "\\"])
@pytest.mark.parametrize("source", ['{}root ::= "a"', "start: x\n{}", "start: x\n{}::="])
def test_whether_something_is_cheap_is_soon_told(source, filler):
    """The thread that asks keeps the core's from its steps."""
    source = source.replace("{}", filler * (16_000 // len(filler)))
    start = time.thread_time()
    for kind in ("grammar", "regex", "json_schema"):
        is_cheap(StructuredOutput(kind, source))
    assert time.thread_time() - start < 0.5


CHEAP_KEYWORDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer", "number", "boolean", ["string", "null"]])},
    optional={"maxLength": st.integers(0, 10**6), "minimum": st.integers(-(10**9), 0), "description": st.text()},
)
CHEAP_SCHEMAS = st.recursive(
    CHEAP_KEYWORDS,
    lambda inner: st.one_of(
        st.builds(
            lambda properties, opened: {"type": "object", "properties": properties, "additionalProperties": opened},
            st.dictionaries(st.text("abcdefgh", min_size=1, max_size=9), inner, max_size=9),
            st.booleans(),
        ),
        st.builds(lambda each, most: {"type": "array", "items": each, "maxItems": most}, inner, st.integers(1, 10**6)),
        st.lists(inner, min_size=1, max_size=5).map(lambda cases: {"anyOf": cases}),
    ),
    max_leaves=60,
)


@settings(max_examples=30, deadline=None)
@given(schema=CHEAP_SCHEMAS)
def test_what_is_cheap_is_soon_compiled(schema):
    if not is_cheap(structured(schema)):
        return
    tokenizer = as_tokenizer(byte_level_vocabulary())
    compiler = Compiler(tokenizer, tokenizer.vocab_size, [])
    start = time.thread_time()
    compiler.compile(structured(schema))
    assert time.thread_time() - start < 2
