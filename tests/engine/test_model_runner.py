"""Steps that are scheduled by hand."""

import msgspec
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
        admission=0,
    )


def plan(add, *shares):
    """Shares are (request id, computed, scheduled, new blocks, needs sample)."""
    scheduled = [
        ScheduledRequest(
            request_id=request_id,
            admission=0,
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


@pytest.fixture
def logits(runner, monkeypatch):
    """Those of the steps, as they were before sampling."""
    logits, compute = [], runner._model.compute_logits
    monkeypatch.setattr(
        runner._model, "compute_logits", lambda rows: logits.append(compute(rows).clone()) or logits[-1]
    )
    return logits


def run(runner, output):
    return runner.collect(runner.launch(output))


def test_logits_are_computed_only_for_rows_that_sample(runner, logits):
    a, b = random_prompts(2, lengths=(20, 20))
    add = [new("a", a), new("b", b)]
    result = run(runner, plan(add, ("a", 0, 20, [3, 4], True), ("b", 0, 12, [5], False)))
    assert logits[0].shape == (1, VOCAB_SIZE)
    assert logits[0].dtype == torch.float32
    assert list(result.token_ids) == ["a"]
    assert result.token_ids["a"] == int(logits[0].argmax())
    assert (result.failed, result.logprobs) == ({}, {})


def test_a_step_in_which_nobody_samples(runner):
    [prompt] = random_prompts(1, lengths=(20, 20))
    assert run(runner, plan([new("a", prompt)], ("a", 0, 12, [3], False))).token_ids == {}


def test_an_empty_step_launches_nothing(runner):
    assert runner.launch(plan([])) is None


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_sampled_token_is_the_next_input(runner, folder, logits, is_ahead):
    """Also where the host does not know it yet."""
    from transformers import AutoModelForCausalLM

    [prompt] = random_prompts(1, lengths=(15, 15))
    step = runner.launch(plan([new("a", prompt)], ("a", 0, 15, [3], True)))
    if not is_ahead:
        first = runner.collect(step).token_ids["a"]
    runner.launch(plan([], ("a", 15, 1, [], True)))
    if is_ahead:
        first = runner.collect(step).token_ids["a"]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([[*prompt, first]])).logits[0, -1]
    torch.testing.assert_close(logits[1][0], expected, atol=1e-4, rtol=1e-4)


def test_what_is_under_way_for_a_lost_row_is_not_appended_to_the_next_owner(runner):
    a, b = random_prompts(2, lengths=(15, 15))
    step = runner.launch(plan([new("a", a)], ("a", 0, 15, [3], True)))
    again = msgspec.structs.replace(
        plan([msgspec.structs.replace(new("a", b), admission=1)]), dropped_request_ids=["a"]
    )
    runner.launch(again)
    assert runner.collect(step).token_ids == {}
    batch = runner._batch
    assert batch._num_tokens[batch._row["a"]] == 15


def test_logprobs_only_for_those_who_asked(runner):
    a, b = random_prompts(2, lengths=(10, 10))
    add = [new("a", a), new("b", b, logprobs=2)]
    result = run(runner, plan(add, ("a", 0, 10, [3], True), ("b", 0, 10, [4], True)))
    assert list(result.logprobs) == ["b"]
    assert result.logprobs["b"].token_id == result.token_ids["b"]
