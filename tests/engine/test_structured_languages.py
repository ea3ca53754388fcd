"""Languages are compiled beside the steps: what waits, what goes on, and how requests end when it fails."""

import json
import threading
import time

import pytest

from configs.sampling import SamplingParams, StructuredOutput
from engine.structured import languages as module
from engine.structured.compiler import Compiler
from engine.structured.languages import Languages
from scheduler.request import Request
from tests.engine.core_runs import add, finish, make_core
from tests.engine.tiny_models import write_tiny
from tests.engine.tiny_tokenizers import as_tokenizer, byte_level_vocabulary

pytest.importorskip("xgrammar")

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path)
    return path


@pytest.fixture
def core(folder):
    return make_core(folder)


class GatedCompiler:
    """Compiles when it is told to; counts."""

    def __init__(self) -> None:
        tokenizer = as_tokenizer(byte_level_vocabulary())
        self.compiler = Compiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
        self.gates: dict[str, threading.Event] = {}
        self.compiled: list[str] = []

    def gate(self, source: str) -> threading.Event:
        return self.gates.setdefault(source, threading.Event())

    def compile(self, structured: StructuredOutput):
        if structured.source in self.gates:
            assert self.gates[structured.source].wait(30)
        self.compiled.append(structured.source)
        return self.compiler.compile(structured)


@pytest.fixture(scope="module")
def shared_compiler():
    return GatedCompiler()


@pytest.fixture
def compiler(shared_compiler):
    shared_compiler.gates, shared_compiler.compiled = {}, []
    yield shared_compiler
    for gate in shared_compiler.gates.values():
        gate.set()


def request(request_id: str, source: str) -> Request:
    return Request(request_id, PROMPT, SamplingParams(structured=StructuredOutput("regex", source)), arrival_time=0.0)


def take_all(languages: Languages, seconds: float = 10) -> dict[str, str | None]:
    """Until nothing is waited for."""
    taken, end = {}, time.monotonic() + seconds
    while languages.has_work:
        assert time.monotonic() < end
        taken |= {request.request_id: reason for request, reason in languages.take(wait=True)}
    return taken


def test_equal_languages_are_compiled_once(compiler):
    languages = Languages(lambda: compiler)
    compiler.gate("a+")
    for name in "xyz":
        languages.want(request(name, "a+"))
    assert "x" in languages
    assert languages.take(wait=True) == []
    compiler.gate("a+").set()
    assert take_all(languages) == {"x": None, "y": None, "z": None}
    languages.want(request("later", "a+"))
    assert take_all(languages) == {"later": None}
    assert compiler.compiled == ["a+"]
    assert languages.of("x") is languages.of("later")
    languages.forget(["x", "unknown"])
    assert languages.of("x") is None


def test_the_cache_is_bounded_and_what_is_in_use_stays(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", 100_000)
    languages = Languages(lambda: compiler)
    for index in range(30):
        languages.want(request(str(index), f"a{{{index + 1}}}"))
    take_all(languages)
    languages.want(request("again", "a{1}"))
    take_all(languages)
    assert compiler.compiled.count("a{1}") == 2
    assert languages.of("0") is not None


def test_a_forgotten_request_does_not_come_back(compiler):
    languages = Languages(lambda: compiler)
    compiler.gate("a")
    languages.want(request("running", "a"))
    languages.want(request("queued", "b"))
    languages.want(request("other", "c"))
    languages.forget(["running", "queued"])
    assert "queued" not in languages
    compiler.gate("a").set()
    assert take_all(languages) == {"other": None}
    assert "b" not in compiler.compiled
    languages.want(request("new", "b"))
    languages.forget(["new"])
    languages.want(request("newer", "b"))
    assert take_all(languages) == {"newer": None}


def test_what_takes_too_long_is_left_alone(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILE_TIME", 0.1)
    languages = Languages(lambda: compiler)
    for source in ("s", "l"):
        compiler.gate(source)
    languages.want(request("slow", "s"))
    languages.want(request("next", "n"))
    taken = take_all(languages)
    assert taken["next"] is None
    assert "seconds to compile" in taken["slow"]
    languages.want(request("slow again", "s"))
    assert "takes" in take_all(languages)["slow again"]
    languages.want(request("late", "l"))
    languages.want(request("behind", "m"))
    taken = take_all(languages)
    assert "seconds to compile" in taken["late"]
    assert "busy" in taken["behind"]
    languages.want(request("cached", "n"))
    assert take_all(languages) == {"cached": None}
    compiler.gate("s").set()
    compiler.gate("l").set()
    end = time.monotonic() + 10
    while languages._jobs and time.monotonic() < end:
        languages.take(wait=True)
    for name, source in (("1", "s"), ("2", "l"), ("3", "o")):
        languages.want(request(name, source))
    assert take_all(languages) == {"1": None, "2": None, "3": None}


def test_without_xgrammar_the_reason_says_how_to_get_it():
    def load():
        raise ModuleNotFoundError("No module named 'xgrammar'")

    languages = Languages(load)
    languages.want(request("x", "a"))
    assert take_all(languages) == {"x": "structured outputs need xgrammar: pip install xgrammar"}


def test_an_unforeseen_exception_ends_one_request(compiler, monkeypatch):
    languages = Languages(lambda: compiler)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile", lambda _: 1 / 0)
        languages.want(request("x", "a"))
        assert "ZeroDivisionError" in take_all(languages)["x"]
    languages.want(request("y", "b"))
    assert take_all(languages) == {"y": None}


def structured(source: str, **fields) -> SamplingParams:
    return SamplingParams(structured=StructuredOutput("regex", source), max_tokens=12, seed=0, **fields)


def test_others_go_on_while_a_language_is_compiled(core, monkeypatch):
    gate = threading.Event()
    compile_ = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda self, each: gate.wait(30) and compile_(self, each))
    add(core, "waits", PROMPT, structured("[a-z]{4}"))
    add(core, "aborted", PROMPT, structured("[a-z]{5}"))
    add(core, "free", PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    outputs = []
    while not any(output.finish_reason for output in outputs):
        outputs += core.step()
    assert {output.request_id for output in outputs} == {"free"}
    assert core.has_work
    refusal = core.add_request(_message("waits"))
    assert (refusal.finish_reason, refusal.error_param) == ("error", "request_id")
    start, steps = time.monotonic(), 0
    while time.monotonic() - start < 0.2:
        assert core.step() == []
        steps += 1
    assert steps < 100  # each waits a little
    core.abort_requests(["aborted"])
    gate.set()
    assert {name: output.finish_reason for name, output in finish(core).items()} == {"waits": "complete"}


def _message(request_id: str):
    from engine.messages import AddRequest

    return AddRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling_params=structured("[a-z]{4}"))


def test_an_abort_while_all_wait_leaves_nothing(core, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Compiler, "compile", lambda *_: gate.wait(30))
    add(core, "x", PROMPT, structured("a"))
    core.step()
    core.abort_requests(["x"])
    assert not core.has_work
    gate.set()


def test_a_prompt_that_does_not_fit_is_refused_behind_its_language(core):
    add(core, "x", [5] * 1024, structured("a"))
    [output] = finish(core).values()
    assert output.finish_reason == "error"
    assert not core._languages._held


def test_a_request_without_output_needs_no_language(core):
    add(core, "x", PROMPT, SamplingParams(max_tokens=0, structured=StructuredOutput("regex", "(")))
    assert finish(core)["x"].finish_reason == "length"


def test_fifty_languages_at_once(core):
    for index in range(50):
        source = json.dumps(
            {"type": "object", "properties": {f"p{index}": {"const": index}}, "required": [f"p{index}"]}
        )
        params = SamplingParams(structured=StructuredOutput("json_schema", source), max_tokens=80, temperature=0)
        add(core, str(index), PROMPT, params)
    outputs = finish(core)
    assert len(outputs) == 50
    assert {output.finish_reason for output in outputs.values()} <= {"complete", "length"}
    assert not core._languages._held
