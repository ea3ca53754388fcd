"""`LLM` for scripts: prompts of both kinds, parameters for one or each, choices, chats, failures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import ContextLengthExceeded, InvalidRequest, SettingsError
from configs.sampling import SamplingParams
from engine.llm import LLM
from tests.engine.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=10)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return LLM(str(folder), dtype="float32", attention_backend="torch_reference", kv_cache_tokens=4096, num_threads=1)


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
    assert llm.generate("Hello", params[1])[0].outputs == other.outputs
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
    assert not llm._core.has_work


def test_chat(llm):
    messages = [{"role": "user", "content": "Hi"}]
    [one] = llm.chat(messages, GREEDY)
    assert llm.chat([messages, messages], GREEDY)[1].outputs == one.outputs
    assert one.prompt_token_ids == llm.tokenizer.encode(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False
    )


def test_the_prompt_in_the_cache_is_counted(llm):
    prompt = list(range(50, 100))
    counts = [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 48]


def test_nothing_runs_when_one_of_the_prompts_is_refused(llm):
    with pytest.raises(ContextLengthExceeded, match="1020"):
        llm.generate([[5], [5] * 1020], GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([[5], []], GREEDY)
    assert not llm._core.has_work


def test_an_interrupted_call_leaves_nothing_running(llm, monkeypatch):
    step, calls = llm._core.step, []

    def interrupted():
        calls.append(step())
        if len(calls) == 3:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "Other"], GREEDY)
    assert not llm._core.has_work


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


def test_the_public_face_brings_torch_only_for_the_engine():
    script = (
        "import sys; from octavo import SamplingParams; assert 'torch' not in sys.modules\n"
        "from octavo import LLM; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def run_script(script, **variables):
    """What it writes to stderr; libgomp lists there what it has read."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    env = {**given, "OMP_DISPLAY_ENV": "VERBOSE", **variables}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stderr


def test_threads_sleep_at_barriers_and_the_callers_environment_stays_as_it_was():
    said = run_script(
        "import os; before = dict(os.environ)\n"
        "from octavo import LLM\n"
        "from octavo import LLM\n"
        "assert {name for name in os.environ if 'NUM_THREADS' in name or 'GOMP' in name} <= set(before)"
    )
    assert "GOMP_SPINCOUNT = '1000'" in said
    assert "RuntimeWarning" not in said


@pytest.mark.parametrize("variables", [{}, {"GOMP_SPINCOUNT": "77"}])
def test_torch_before_the_engine_is_warned_of(variables):
    said = run_script("import torch; from octavo import LLM; from octavo import LLM", **variables)
    assert said.count("RuntimeWarning: torch was imported before LLM") == (not variables)
    assert ("GOMP_SPINCOUNT = '77'" in said) == bool(variables)
