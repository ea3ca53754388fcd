"""A step scheduled while the one before it is under way: every output is what it is without that."""

import pytest

from configs.sampling import RepetitionDetection, SamplingParams, StructuredOutput, ThinkingBudget
from tests.engine.core_runs import add, finish, make_core, random_prompts
from tests.engine.tiny_models import write_tiny

PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=25, seed=1),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, max_tokens=40, seed=2, logprobs=3),
    SamplingParams(temperature=1.0, max_tokens=30, seed=3, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, max_tokens=30, seed=4, presence_penalty=1.5, logit_bias={7: 2.0}),
    SamplingParams(temperature=1.5, max_tokens=60, seed=5, stop_token_ids=tuple(range(20, 60)), min_tokens=6),
    SamplingParams(temperature=1.0, max_tokens=30, seed=6, bad_sequences=((100, 101), (9,))),
    SamplingParams(temperature=1.0, max_tokens=30, seed=7, thinking=ThinkingBudget(5, (60, 61))),
    SamplingParams(temperature=1.0, max_tokens=30, seed=8, structured=StructuredOutput("regex", "[a-f]{3,40}x")),
    SamplingParams(max_tokens=40, repetition_detection=RepetitionDetection(4, 1, 3), logit_bias={9: 50.0}, seed=1),
    SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=0, max_tokens=0, pooling="mean"),
    SamplingParams(temperature=1.0, max_tokens=1, seed=9),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


def outputs(folder, **settings):
    """By kernels of which rows do not depend on their batch mates, so that bits can be compared."""
    core = make_core(folder, max_num_batched_tokens=64, attention_backend="cpu", **settings)
    prompts = random_prompts(2 * len(PARAMS), lengths=(5, 60))
    early = []
    for index, prompt in enumerate(prompts):
        add(core, str(index), prompt, PARAMS[index % len(PARAMS)])
        if index % 3 == 0:
            early += core.step()
    assert core._most_under_way == bool(settings.get("async_scheduling"))
    return finish(core, early)


@pytest.fixture(scope="module")
def expected(folder):
    return outputs(folder)


@pytest.mark.parametrize("kv_cache_tokens", [16384, 320])
def test_every_output_is_the_same(folder, expected, kv_cache_tokens):
    """With the small cache some requests are preempted while a step of theirs is under way."""
    assert outputs(folder, async_scheduling=True, kv_cache_tokens=kv_cache_tokens) == expected


def test_the_parameters_make_a_difference(expected):
    assert len({tuple(output.new_token_ids) for output in expected.values() if output.new_token_ids}) > 20
    assert {output.finish_reason for output in expected.values()} >= {"length", "stop", "complete", "repetition"}


def test_an_aborted_request_is_silent_although_a_step_of_it_is_under_way(folder):
    core = make_core(folder, async_scheduling=True)
    [prompt] = random_prompts(1)
    add(core, "a", prompt, PARAMS[0])
    core.step()
    core.step()
    core.abort_requests(["a"])
    add(core, "a", prompt[:4], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    ahead = finish(core)
    core = make_core(folder)
    add(core, "a", prompt[:4], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert ahead == finish(core)
