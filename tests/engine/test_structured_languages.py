"""Languages are compiled beside the steps: what waits, what goes on, and how requests end when it fails."""

import json
import threading
import time

import pytest

from configs.errors import CompilerBusy, InvalidRequest, RequestError
from configs.sampling import SamplingParams, StructuredOutput
from engine.structured import languages as module
from engine.structured.compiler import Compiler
from engine.structured.language import Matcher
from engine.structured.languages import ThreadedLanguages
from engine.structured.trial import Trial
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


class Trials:
    """Costly grammars end as the test says, when it says so."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.outcomes: dict[str, Trial | Exception] = {}

    def start(self) -> None: ...
    def close(self) -> None: ...

    def compile(self, structured: StructuredOutput, others_wait) -> Trial:
        if structured.source in self.gates:
            assert self.gates[structured.source].wait(30)
        outcome = self.outcomes.get(structured.source, Trial(1000))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


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


def take_all(languages: ThreadedLanguages, seconds: float = 10) -> dict[str, RequestError | None]:
    """Until nothing is waited for."""
    taken, end = {}, time.monotonic() + seconds
    while languages.num_waiting:
        assert time.monotonic() < end
        taken |= {request.request_id: reason for request, reason in languages.take(wait=True)}
    return taken


def test_equal_languages_are_compiled_once(compiler):
    languages = ThreadedLanguages(lambda: compiler, Trials())
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
    languages = ThreadedLanguages(lambda: compiler, Trials())
    for index in range(30):
        languages.want(request(str(index), f"a{{{index + 1}}}"))
    take_all(languages)
    languages.want(request("again", "a{1}"))
    take_all(languages)
    assert compiler.compiled.count("a{1}") == 2
    assert languages.of("0") is not None


def test_a_forgotten_request_does_not_come_back(compiler):
    languages = ThreadedLanguages(lambda: compiler, Trials())
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


COSTLY = "[^{}]{{1,99}}"


def test_costly_ones_do_not_hold_up_cheap_ones(compiler):
    trials = Trials()
    languages = ThreadedLanguages(lambda: compiler, trials)
    sources = [COSTLY.format(each) for each in "abc"]
    trials.gates = {source: threading.Event() for source in sources}
    for source in sources:
        languages.want(request(source, source))
    languages.want(request("cheap", "a"))
    taken, end = {}, time.monotonic() + 10
    while not taken and time.monotonic() < end:
        taken |= {request.request_id: reason for request, reason in languages.take(wait=True)}
    assert taken == {"cheap": None}
    for gate in trials.gates.values():
        gate.set()
    assert take_all(languages) == dict.fromkeys(sources)


def test_a_costly_one_waits_for_others_within_bounds_and_may_come_again(compiler, monkeypatch):
    trials = Trials()
    languages = ThreadedLanguages(lambda: compiler, trials)
    sources = [COSTLY.format(each) for each in "abc"]
    trials.gates = {source: threading.Event() for source in sources[:2]}
    for source in sources[:2]:
        languages.want(request(source, source))
    time.sleep(0.2)
    monkeypatch.setattr(module, "MAX_WAIT", 0.1)
    languages.want(request("waits", sources[2]))
    taken, end = {}, time.monotonic() + 10
    while not taken and time.monotonic() < end:
        taken |= {request.request_id: reason for request, reason in languages.take(wait=True)}
    [error] = taken.values()
    assert (error.status, error.code, error.retry_after) == (503, "compiler_busy", 5)
    for gate in trials.gates.values():
        gate.set()
    take_all(languages)
    languages.want(request("again", sources[2]))
    assert take_all(languages) == {"again": None}


def test_how_a_trial_ends_is_how_its_request_does(compiler):
    trials = Trials()
    languages = ThreadedLanguages(lambda: compiler, trials)
    bad, slow, busy, large, short = (COSTLY.format(each) for each in "abcde")
    trials.outcomes = {
        bad: Trial(error="nothing"),
        slow: InvalidRequest("it takes more than 10 seconds to compile", param="structured"),
        busy: CompilerBusy("later"),
        large: Trial(1 << 30),
        short: OSError("no memory for a process"),
    }
    for source in (bad, slow, busy, large, short):
        languages.want(request(source, source))
    taken = take_all(languages)
    statuses = {bad: 400, slow: 400, busy: 503, large: 400, short: 503}
    assert {source: error.status for source, error in taken.items()} == statuses
    assert "nothing" in taken[bad].message
    assert "seconds to compile" in taken[slow].message
    assert "MB" in taken[large].message
    trials.outcomes.clear()
    for source in (busy, slow, short):
        languages.want(request(source, source))
    taken = take_all(languages)
    assert (taken[busy], taken[short]) == (None, None)
    assert taken[slow].status == 400  # it would take as long again


def test_without_xgrammar_the_reason_says_how_to_get_it():
    def load():
        raise ModuleNotFoundError("No module named 'xgrammar'")

    languages = ThreadedLanguages(load, Trials())
    languages.want(request("x", "a"))
    assert take_all(languages)["x"].message == "structured outputs need xgrammar: pip install xgrammar"


def test_an_unforeseen_exception_ends_one_request(compiler, monkeypatch):
    languages = ThreadedLanguages(lambda: compiler, Trials())
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile", lambda _, **options: 1 / 0)
        languages.want(request("x", "a"))
        assert "ZeroDivisionError" in take_all(languages)["x"].message
    languages.want(request("y", "b"))
    assert take_all(languages) == {"y": None}


def structured(source: str, **fields) -> SamplingParams:
    return SamplingParams(structured=StructuredOutput("regex", source), max_tokens=12, seed=0, **fields)


def test_others_go_on_while_a_language_is_compiled(core, monkeypatch):
    gate = threading.Event()
    compile_ = Compiler.compile
    monkeypatch.setattr(Compiler, "compile", lambda self, each, **options: gate.wait(30) and compile_(self, each))
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
    monkeypatch.setattr(Compiler, "compile", lambda *_, **options: gate.wait(30))
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


@pytest.mark.timeout(60)
def test_steps_are_short_in_a_language_that_took_long_to_compile(compiler):
    words = json.dumps({"enum": [f"word {index} {index * index}" for index in range(7000)]})
    structured = StructuredOutput("json_schema", words)
    trials = Trials()
    trials.outcomes[words] = Trial(1000)
    languages = ThreadedLanguages(lambda: compiler.compiler, trials)
    languages.want(Request("x", PROMPT, SamplingParams(structured=structured), arrival_time=0.0))
    assert take_all(languages, 30) == {"x": None}
    matcher = Matcher(languages.of("x"), ())
    for token_id in as_tokenizer(byte_level_vocabulary()).encode('"word 12'):
        matcher.append(token_id)
        assert not matcher.is_too_slow
