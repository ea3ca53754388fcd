"""Steps that are scheduled by hand."""

import pytest
import torch

from configs.sampling import SamplingParams
from scheduler.output import NewRequest, ScheduledRequest, SchedulerOutput
from tests.engine.core_runs import make_core, random_prompts
from tests.engine.tiny_models import VOCAB_SIZE, write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture
def runner(folder):
    """Of a core that is idle after its warm-up."""
    core = make_core(folder)
    core._runner._batch.update(core.scheduler.schedule(0.0))
    return core._runner


def new(request_id, prompt, **params):
    return NewRequest(
        request_id=request_id,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(temperature=0, **params),
        stop_token_ids=frozenset(),
        seed=0,
    )


def plan(add, *shares):
    """Shares are (request id, computed, scheduled, new blocks, needs sample)."""
    scheduled = [
        ScheduledRequest(
            request_id=request_id,
            num_computed_tokens=computed,
            num_scheduled_tokens=count,
            new_block_ids=blocks,
            needs_sample=sample,
        )
        for request_id, computed, count, blocks, sample in shares
    ]
    return SchedulerOutput(
        new_requests=add,
        scheduled=scheduled,
        dropped_request_ids=[],
        num_scheduled_tokens=sum(share[2] for share in shares),
    )


def test_logits_are_computed_only_for_rows_that_sample(runner):
    a, b = random_prompts(2, lengths=(20, 20))
    add = [new("a", a), new("b", b)]
    step = runner.execute(plan(add, ("a", 0, 20, [3, 4], True), ("b", 0, 12, [5], False)))
    assert step.logits.shape == (1, VOCAB_SIZE)
    assert step.logits.dtype == torch.float32
    result = runner.sample(step)
    assert list(result.token_ids) == ["a"]
    assert result.token_ids["a"] == int(step.logits.argmax())
    assert (result.failed, result.logprobs) == ({}, {})


def test_a_step_in_which_nobody_samples(runner):
    [prompt] = random_prompts(1, lengths=(20, 20))
    step = runner.execute(plan([new("a", prompt)], ("a", 0, 12, [3], False)))
    assert runner.sample(step).token_ids == {}


def test_the_sampled_token_is_the_next_input(runner, folder):
    from transformers import AutoModelForCausalLM

    [prompt] = random_prompts(1, lengths=(15, 15))
    first = runner.sample(runner.execute(plan([new("a", prompt)], ("a", 0, 15, [3], True)))).token_ids["a"]
    step = runner.execute(plan([], ("a", 15, 1, [], True)))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([[*prompt, first]])).logits[0, -1]
    torch.testing.assert_close(step.logits[0], expected, atol=1e-4, rtol=1e-4)


def test_logprobs_only_for_those_who_asked(runner):
    a, b = random_prompts(2, lengths=(10, 10))
    add = [new("a", a), new("b", b, logprobs=2)]
    result = runner.sample(runner.execute(plan(add, ("a", 0, 10, [3], True), ("b", 0, 10, [4], True))))
    assert list(result.logprobs) == ["b"]
    assert result.logprobs["b"].token_id == result.token_ids["b"]
