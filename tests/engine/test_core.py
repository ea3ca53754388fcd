"""The core's own rules: ends, refusals, failures, aborts, what it reports at start."""

import gc
import inspect

import msgspec
import numpy as np
import pytest
import torch

from configs.errors import SettingsError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.checkpoints import open_checkpoint
from engine.core import EngineCore
from engine.messages import AddRequest
from engine.models.config import RopeConfig
from engine.start import max_context
from tests.engine.core_runs import add, finish, make_core, random_prompts, token_ids
from tests.engine.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def core(folder):
    return make_core(folder)


@pytest.fixture
def prompt():
    return random_prompts(1, lengths=(20, 20), seed=5)[0]


def run_one(core, prompt, params, **fields):
    add(core, "one", prompt, params, **fields)
    return finish(core)["one"]


def test_ready_tells_what_was_loaded(core):
    ready = core.ready
    assert ready.architecture == "LlamaForCausalLM"
    assert (ready.dtype, ready.device, ready.attention_backend) == ("float32", "cpu", "torch_reference")
    assert (ready.max_model_len, ready.kv_cache_tokens, ready.block_size) == (1024, 16384, 16)
    assert list(ready.timings) == ["checkpoint", "weights", "kv_cache", "warm_up"]
    assert not core.has_work


def test_a_step_can_be_read_in_one_function(folder, prompt, monkeypatch):
    """Schedule, launch, collect, update: the step itself calls them, in this order."""
    core, calls = make_core(folder), []

    def spy_on(owner, name):
        call = getattr(owner, name)

        def spy(*arguments):
            calls.append((name, inspect.currentframe().f_back.f_code))
            return call(*arguments)

        monkeypatch.setattr(owner, name, spy)

    for name in ("schedule", "update_from_output"):
        spy_on(core.scheduler, name)
    for name in ("launch", "collect"):
        spy_on(core._runner, name)
    add(core, "one", prompt, GREEDY)
    core.step()
    assert [name for name, _ in calls] == ["schedule", "launch", "collect", "update_from_output"]
    assert {code for _, code in calls} == {EngineCore.step.__code__}
    assert len(inspect.getsource(EngineCore.step).splitlines()) <= 30


def test_length_and_stop(core, prompt):
    free = run_one(core, prompt, GREEDY)
    assert (free.finish_reason, free.stop_reason, len(free.new_token_ids)) == ("length", None, 12)
    third = free.new_token_ids[2]
    ended = run_one(core, prompt, GREEDY, eos_token_ids=(third,))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.new_token_ids == free.new_token_ids[: free.new_token_ids.index(third) + 1]
    own = run_one(core, prompt, SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(third,)))
    assert (own.finish_reason, own.stop_reason, own.new_token_ids) == ("stop", third, ended.new_token_ids)


def test_ignore_eos_covers_every_end_of_sequence_id_but_no_stop_id(core, prompt):
    free = run_one(core, prompt, GREEDY).new_token_ids
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert run_one(core, prompt, params, eos_token_ids=tuple(free)).new_token_ids == free


def test_min_tokens_holds_off_the_end(core, prompt):
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=6, logit_bias={9: 100.0})
    output = run_one(core, prompt, params, eos_token_ids=(9,))
    assert output.finish_reason == "stop"
    assert output.new_token_ids.index(9) == 6


@pytest.mark.parametrize("chunk", [512, 16])
def test_logprobs_come_with_every_token_and_no_sooner(folder, prompt, chunk):
    core = make_core(folder, max_num_batched_tokens=chunk, max_num_seqs=4)
    long = prompt * 2
    output = run_one(core, long, SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    assert [entry.token_id for entry in output.logprobs] == output.new_token_ids
    assert all(len(entry.top) == 2 and entry.top[0][0] == entry.token_id for entry in output.logprobs)
    assert run_one(core, long, GREEDY).logprobs == []


def test_logit_bias_holds_for_every_token(core, prompt):
    output = run_one(core, prompt, SamplingParams(temperature=0, max_tokens=8, logit_bias={77: 100.0}))
    assert output.new_token_ids == [77] * 8


def test_what_can_never_fit_is_refused_at_once(folder):
    core = make_core(folder, kv_cache_tokens=256)
    refusal = core.add_request(AddRequest(request_id="big", prompt_token_ids=[5] * 1000, sampling_params=GREEDY))
    assert (refusal.finish_reason, refusal.error_type) == ("error", "ContextLengthExceeded")
    assert "1000" in refusal.error
    assert len(token_ids(core, random_prompts(10), GREEDY)) == 10
    grown = run_one(core, [5] * 200, SamplingParams(temperature=0, max_tokens=500))
    assert (grown.finish_reason, len(grown.new_token_ids)) == ("length", 57)


def test_an_output_that_is_no_number_fails_alone(tmp_path, prompt, caplog):
    """Token 9 poisons its own request; the mates, and those who get its blocks later, are well."""
    model = write_tiny(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    model.save_pretrained(tmp_path)
    prompt = [5 if token == 9 else token for token in prompt]
    core = make_core(tmp_path, kv_cache_tokens=256)
    for params in (GREEDY, SamplingParams(max_tokens=12, top_p=0.9, logprobs=2)):
        add(core, "good", prompt, GREEDY)
        add(core, "bad", [7, 9, 8], params)
        add(core, "also good", prompt, GREEDY)
        outputs = finish(core)
        assert outputs["bad"].finish_reason == "error"
        assert outputs["bad"].new_token_ids == []
        assert outputs["good"].new_token_ids == outputs["also good"].new_token_ids
        assert outputs["good"].finish_reason == "length"
        assert "bad" in caplog.text


def test_nothing_is_left_of_aborted_requests(folder):
    """A third waiting, a third in the middle of their prompts, a third decoding."""
    core = make_core(folder, kv_cache_tokens=2048, max_num_batched_tokens=64, max_num_seqs=16)
    for wave in range(3):
        for index, prompt in enumerate(random_prompts(60, lengths=(10, 150), seed=wave)):
            add(core, str(index), prompt, SamplingParams(max_tokens=20))
        for _ in range(3 * wave):
            core.step()
        core.abort_requests(map(str, np.random.default_rng(wave).permutation(60)[:20]))
        core.step()
        core.scheduler.check_integrity()
        core.abort_requests(map(str, range(60)))
        assert not core.has_work
        assert core.scheduler.num_used_blocks == 0
    assert len(core._runner._batch._row) <= 16
    assert token_ids(core, random_prompts(3), GREEDY) == token_ids(make_core(folder), random_prompts(3), GREEDY)


def test_finished_requests_leave_no_rows(core):
    token_ids(core, random_prompts(20), SamplingParams(max_tokens=3, repetition_penalty=1.2))
    output = core.scheduler.schedule(0.0)
    core._runner._batch.update(output)
    assert core._runner._batch._row == {}
    assert core._runner._batch.sampling._edits == {}
    assert core.scheduler.requests == {}


def test_cache_salts_part_equal_prompts(folder, prompt):
    core = make_core(folder)
    counts = []
    for salt in (None, None, "a", "a", "b"):
        counts.append(run_one(core, prompt, GREEDY, cache_salt=salt).num_cached_tokens)
    assert counts == [0, 16, 0, 16, 0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_tokens": 8}, "one block of 16"),
        ({"kv_cache_tokens": 10**12}, "GiB are free"),
        ({"max_model_len": 5000}, "1024"),
        ({"dtype": "float16"}, "float16"),
        ({"attention_backend": "nonsense"}, "nonsense"),
    ],
)
def test_settings_that_cannot_work_say_why(folder, settings, words):
    with pytest.raises(SettingsError, match=words):
        make_core(folder, **settings)


def test_a_small_cache_is_noted(folder):
    core = make_core(folder, kv_cache_tokens=256)
    assert any("256 tokens" in note and "1024" in note for note in core.ready.notes)


def test_the_cache_is_no_larger_than_the_largest_batch(folder):
    core = make_core(folder, kv_cache_tokens=None, max_num_seqs=2, max_model_len=100)
    assert core.ready.kv_cache_tokens == 208


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (RopeConfig(), 1024),
        (RopeConfig(rope_type="linear", parameters={"factor": 4.0}), 4096),
        (RopeConfig(rope_type="dynamic", parameters={"factor": 2.0}), 2048),
        (RopeConfig(rope_type="yarn", parameters={"factor": 4.0, "original_max_position_embeddings": 1024}), 4096),
        (RopeConfig(rope_type="yarn", parameters={"factor": 4.0, "original_max_position_embeddings": 256}), 1024),
    ],
)
def test_the_context_is_the_extended_one(folder, rope, limit):
    model = msgspec.structs.replace(open_checkpoint(folder).config, rope=rope)
    assert max_context(EngineConfig(), model) == limit
    assert max_context(EngineConfig(max_model_len=100), model) == 100
    with pytest.raises(SettingsError, match=str(limit)):
        max_context(EngineConfig(max_model_len=limit + 1), model)


def test_nothing_of_a_finished_request_is_kept(folder):
    """Objects after 200 and after 800 requests that share nothing; the prefix cache is full well before."""
    core = make_core(folder, kv_cache_tokens=256)
    counts = []
    for prompt in random_prompts(800, lengths=(33, 40)):
        run_one(core, prompt, SamplingParams(temperature=0, max_tokens=2, logprobs=1, seed=1))
        counts.append(0)
        if len(counts) in (200, 800):
            gc.collect()
            counts[-1] = len(gc.get_objects())
    assert abs(counts[799] - counts[199]) < 100
