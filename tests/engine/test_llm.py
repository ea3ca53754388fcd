"""`LLM` for scripts: prompts of both kinds, parameters for one or each, choices, chats, streams, beams, failures."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from configs.errors import (
    ContextLengthExceeded,
    DeadlinePassed,
    EngineDead,
    InvalidRequest,
    RequestFailed,
    SettingsError,
)
from configs.sampling import BeamSearchParams, SamplingParams
from configs.settings import ServerConfig
from engine.llm import LLM
from engine.observer import Observer
from server.app import create_app
from tests.engine.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=10)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    llm = LLM(str(folder), dtype="float32", attention_backend="torch_reference", kv_cache_tokens=4096, num_threads=1)
    yield llm
    llm.close()


def wait_idle(llm):
    """Until nothing runs or waits in the core."""
    end = time.monotonic() + 20
    while (stats := llm._engine.stats()).num_running or stats.num_waiting:
        assert time.monotonic() < end
        time.sleep(0.01)


def without_logprobs(request):
    outputs = [replace(output, logprobs=output.logprobs and len(output.logprobs)) for output in request.outputs]
    return replace(request, outputs=outputs)


def test_prompts_of_both_kinds_in_order(llm):
    text, ids = "Hello", llm.tokenizer.encode("Hello")
    results = llm.generate([text, ids, "Other", [7, 8]], GREEDY)
    assert [result.prompt for result in results] == [text, None, "Other", None]
    assert results[0].prompt_token_ids == results[1].prompt_token_ids == ids
    assert results[0].outputs == results[1].outputs
    [output] = results[3].outputs
    assert (output.index, output.finish_reason, len(output.token_ids), output.logprobs) == (0, "length", 10, None)
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_a_single_prompt_of_either_kind(llm):
    assert llm.generate("Hello", GREEDY) == llm.generate(["Hello"], GREEDY)
    assert llm.generate([7, 8], GREEDY) == llm.generate([[7, 8]], GREEDY)
    assert llm.generate([], GREEDY) == []


def test_parameters_of_each_prompt(llm):
    params = [GREEDY, SamplingParams(n=3, seed=5, max_tokens=4, logprobs=1)]
    one, other = llm.generate(["Hello", "Hello"], params)
    assert [output.index for output in other.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in other.outputs}) == 3
    assert all(len(output.logprobs) == len(output.token_ids) for output in other.outputs)
    alone = llm.generate("Hello", params[1])[0]
    assert without_logprobs(alone) == without_logprobs(other)
    for one_output, other_output in zip(alone.outputs, other.outputs, strict=True):
        found = [[entry.logprob for entry in output.logprobs] for output in (one_output, other_output)]
        assert found[0] == pytest.approx(found[1], abs=1e-5)  # sums depend on which rows share a step
    assert len(one.outputs) == 1
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["Hello"], params)


def test_more_prompts_than_places(llm):
    prompts = [[3 + index % 250] * (1 + index % 7) for index in range(600)]
    params = SamplingParams(temperature=0, max_tokens=2)
    results = llm.generate(prompts, params)
    assert [result.prompt_token_ids for result in results] == prompts
    assert all(result.outputs[0].finish_reason == "length" for result in results)


def test_stop_strings(llm):
    text = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].text
    stop = text[10:13]
    [result] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=40, stop=(stop,)))
    assert result.outputs[0].text == text[: text.index(stop)]
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", stop)
    wait_idle(llm)


def test_chat(llm):
    messages = [{"role": "user", "content": "Hi"}]
    [one] = llm.chat(messages, GREEDY)
    assert llm.chat([messages, messages], GREEDY)[1].outputs == one.outputs
    assert llm.chat([], GREEDY) == []
    assert one.prompt_token_ids == llm.tokenizer.encode(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False
    )


def test_the_prompt_in_the_cache_is_counted(llm):
    prompt = list(range(50, 100))
    counts = [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 48]


def test_nothing_runs_when_one_of_the_prompts_is_refused(llm):
    before = llm._engine.stats().counters
    with pytest.raises(ContextLengthExceeded, match="1020"):
        llm.generate([[5], [5] * 1020], GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([[5], []], GREEDY)
    assert llm._engine.stats().counters == before


def test_an_interrupted_call_leaves_nothing_running(llm):
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "Other"] * 500, ENDLESS)
    wait_idle(llm)


def test_streamed_requests_grow_to_the_whole(llm):
    params = [GREEDY, SamplingParams(n=3, seed=5, max_tokens=20, logprobs=1), SamplingParams(max_tokens=0)]
    prompts = ["Hello", [7, 8, 9], "Other"]
    seen, num_parts = {}, 0
    for request in llm.stream(prompts, params):
        texts = seen.setdefault(id(request), ["" for _ in request.outputs])
        for output in request.outputs:
            texts[output.index] += output.delta
            assert texts[output.index] == output.text
        num_parts += 1
        last = request
    assert num_parts > len(prompts)
    assert last.finished
    streamed = {request.prompt: without_logprobs(request) for request in llm.stream(prompts, params)}
    assert streamed == {request.prompt: without_logprobs(request) for request in llm.generate(prompts, params)}


def test_a_stop_string_ends_a_stream(llm):
    text = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=40))[0].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, stop=(text[10:13],))
    pieces = [request.outputs[0].delta for request in llm.stream("Hello", params)]
    assert len(pieces) > 1
    assert "".join(pieces) == text[: text.index(text[10:13])]


def test_chats_are_streamed_too(llm):
    messages = [{"role": "user", "content": "Hi"}]
    *_, streamed = llm.stream_chat(messages, GREEDY, add_generation_prompt=False, timeout=60)
    assert [streamed] == llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert streamed != llm.chat(messages, GREEDY)[0]
    [late] = llm.chat(messages, ENDLESS, timeout=0.05)
    assert late.outputs[0].finish_reason == "timeout"


def test_a_stream_that_is_left_ends_what_runs(llm):
    for request in llm.stream(["Hello", "Other"], ENDLESS):
        assert not request.finished
        break
    wait_idle(llm)


def test_refusals_come_with_the_call_of_stream(llm):
    with pytest.raises(InvalidRequest, match="empty"):
        llm.stream([[5], []], GREEDY)


def test_time_is_bounded(llm):
    start = time.monotonic()
    [request] = llm.generate("Hello", SamplingParams(max_tokens=900, ignore_eos=True), timeout=0.05)
    assert time.monotonic() - start < 5
    assert request.outputs[0].finish_reason == "timeout"
    assert 0 < len(request.outputs[0].token_ids) < 900
    with pytest.raises(DeadlinePassed):
        llm.beam_search("Hello", BeamSearchParams(beam_width=4, max_tokens=500), timeout=0.05)


def test_cached_prefixes_are_shared_with_equal_salts(llm):
    prompt = list(range(100, 150))
    counts = [llm.generate(prompt, GREEDY, cache_salt=salt)[0].num_cached_tokens for salt in ("a", "b", "a")]
    assert counts == [0, 0, 48]


def test_lower_numbers_run_first(tmp_path):
    write_tiny(tmp_path)
    settings = {"dtype": "float32", "kv_cache_tokens": 1024, "num_threads": 1, "max_num_seqs": 1}
    llm = LLM(str(tmp_path), scheduling_policy="priority", **settings)
    ended = []

    def finish(name, priority):
        llm.generate("Hello", SamplingParams(max_tokens=300, ignore_eos=True), priority=priority)
        ended.append(name)

    threads = [threading.Thread(target=finish, args=one) for one in (("late", 5), ("early", -5))]
    stream = llm.stream("Hello", ENDLESS, priority=-9)
    next(stream)
    for thread in threads:
        thread.start()
    while llm._engine.stats().num_waiting < 2:
        time.sleep(0.01)
    stream.close()
    for thread in threads:
        thread.join()
    assert ended == ["early", "late"]
    llm.close()


def test_beams_are_those_of_the_server(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.5)
    found = llm.beam_search(["Hello", [7, 8]], params)
    app = create_app(llm._engine, ServerConfig(), "tiny")
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 8, "length_penalty": 0.5, "return_token_ids": True}

    async def ask(prompt):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return (await client.post("/v1/completions", json={"prompt": prompt, **fields})).json()["choices"]

    for request, prompt in zip(found, ["Hello", [7, 8]], strict=True):
        choices = llm._run(ask(prompt))
        assert [output.text for output in request.outputs] == [choice["text"] for choice in choices]
        assert [output.finish_reason for output in request.outputs] == [choice["finish_reason"] for choice in choices]
        sums = [output.cumulative_logprob / len(output.token_ids) ** 0.5 for output in request.outputs]
        assert sums == sorted(sums, reverse=True)
    llm._engine.observer = Observer()  # the app's knows HTTP requests only
    assert found[0].prompt == "Hello"
    for wrong in ({"beam_width": 0}, {"beam_width": 11}, {"max_tokens": 0}, {"length_penalty": 99}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})


async def test_scripts_with_an_event_loop_of_their_own_can_use_it(llm):
    assert llm.generate("Hello", GREEDY) == await asyncio.to_thread(llm.generate, "Hello", GREEDY)


def test_the_engine_ends_with_the_object_and_its_end_is_told(tmp_path):
    write_tiny(tmp_path)
    settings = {"dtype": "float32", "kv_cache_tokens": 1024, "num_threads": 1}
    llm = LLM(str(tmp_path), **settings)
    os.kill(llm._engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        llm.generate("Hello", ENDLESS)
    llm = LLM(str(tmp_path), **settings)
    pid = llm._engine.pid
    assert psutil.pid_exists(pid)
    del llm
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_calls_of_other_threads_end_with_the_engine(tmp_path):
    write_tiny(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024, num_threads=1)
    ended = []

    def ask():
        with pytest.raises(EngineDead):
            llm.generate(["Hello"] * 50, ENDLESS)
        ended.append(True)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not llm._engine.stats().num_running:
        time.sleep(0.01)
    llm.close()
    for thread in threads:
        thread.join(10)
    assert len(ended) == 2
    for call in (llm.generate, llm.stream, llm.embed):
        with pytest.raises(EngineDead, match="closed"):
            call("Hello")


def test_an_interrupted_start_leaves_nothing_behind(tmp_path, monkeypatch):
    write_tiny(tmp_path / "model")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    main, others = threading.main_thread().ident, set(psutil.Process().children())
    threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        LLM(str(tmp_path / "model"), num_threads=1)
    assert set(psutil.Process().children()) <= others
    assert list(folder.iterdir()) == []


def test_where_one_search_fails_the_others_end(llm, monkeypatch):
    search = llm._engine.beam_search

    async def failing(token_ids, *args, **options):
        if len(token_ids) == 1:
            await asyncio.sleep(0.1)
            raise RequestFailed("no")
        return await search(token_ids, *args, **options)

    monkeypatch.setattr(llm._engine, "beam_search", failing)
    with pytest.raises(RequestFailed):
        llm.beam_search([[5], [5, 6]], BeamSearchParams(beam_width=2, max_tokens=1000))
    time.sleep(0.2)
    before = llm._engine.stats().counters.num_steps
    time.sleep(0.2)
    assert llm._engine.stats().counters.num_steps == before


def test_a_request_that_fails_on_the_way_says_why(llm):
    nothing_allowed = SamplingParams(bad_token_ids=tuple(range(llm.info.vocab_size)))
    good, bad = llm.generate(["Hello", "Hello"], [GREEDY, nothing_allowed])
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"
    assert "no token is allowed" in bad.outputs[0].error


def test_unknown_and_malformed_settings():
    with pytest.raises(SettingsError, match="max_num_seqs"):
        LLM("nowhere", max_num_seq=4)
    with pytest.raises(SettingsError, match="port"):
        LLM("nowhere", port=80)
    with pytest.raises(SettingsError, match="block"):
        LLM("nowhere", block_size=0)


def test_scripts_import_no_torch():
    script = "import sys; from octavo import LLM, SamplingParams; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_script_ends_with_its_engine(tmp_path):
    write_tiny(tmp_path)
    script = (
        "import sys, torch; from octavo import LLM; llm = LLM(sys.argv[1], kv_cache_tokens=1024, num_threads=1)\n"
        "print(llm._engine.pid, len(llm.generate('Hello')[0].outputs))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pid, count = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert count == "1"
    assert not psutil.pid_exists(int(pid))
