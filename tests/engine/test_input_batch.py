"""The arrays of a step against a loop over tokens."""

import numpy as np
import pytest
import torch

from configs.sampling import SamplingParams
from engine.input_batch import InputBatch
from scheduler.output import NewRequest, ScheduledRequest, SchedulerOutput

BLOCK = 4


def new(request_id, token_ids, num_prompt_tokens=None, admission=0, **params):
    return NewRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling_params=SamplingParams(**params),
        stop_token_ids=frozenset(),
        seed=0,
        admission=admission,
    )


def share(request_id, computed, scheduled, blocks=(), sample=False):
    return ScheduledRequest(
        request_id=request_id,
        admission=0,
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        new_block_ids=list(blocks),
        needs_sample=sample,
    )


def step(batch, *scheduled, add=(), drop=()):
    output = SchedulerOutput(
        new_requests=list(add),
        scheduled=list(scheduled),
        dropped_request_ids=list(drop),
        num_scheduled_tokens=sum(each.num_scheduled_tokens for each in scheduled),
    )
    batch.update(output)
    return batch.inputs(output.scheduled)


@pytest.fixture
def batch():
    return InputBatch(max_num_seqs=3, max_model_len=32, block_size=BLOCK)


def test_a_mixed_step(batch):
    """a decodes, b is in the middle of its prompt, c starts behind a cached block."""
    a, b, c = [10, 11, 12, 13, 14], list(range(20, 30)), list(range(40, 47))
    step(batch, share("a", 0, 5, [7, 3], sample=True), add=[new("a", a)])
    batch.append(np.array([0]), np.array([15]))
    inputs = step(
        batch,
        share("a", 5, 1, sample=True),
        share("b", 0, 6, [9, 2]),
        share("c", 4, 3, [5, 8], sample=True),
        add=[new("b", b), new("c", c, num_prompt_tokens=5)],
    )
    assert inputs.token_ids.tolist() == [15, *b[:6], *c[4:7]]
    assert inputs.positions.tolist() == [5, 0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert inputs.rope_lengths.tolist() == [6, *[10] * 6, 5, 6, 7]
    assert inputs.query_start_loc.tolist() == [0, 1, 7, 10]
    assert inputs.seq_lens.tolist() == [6, 6, 7]
    assert inputs.block_table.tolist() == [[7, 3], [9, 2], [5, 8]]
    assert inputs.slot_mapping.tolist() == [13, 36, 37, 38, 39, 8, 9, 32, 33, 34]
    assert inputs.logit_indices.tolist() == [0, 9]
    assert inputs.sample_ids == ["a", "c"]
    dtypes = {name: str(getattr(inputs, name).dtype) for name in ("token_ids", "block_table", "slot_mapping")}
    assert dtypes == {"token_ids": "int64", "block_table": "int32", "slot_mapping": "int64"}
    assert inputs.block_table.flags.c_contiguous


def test_a_row_is_clean_for_its_next_request(batch):
    step(batch, share("a", 0, 16, [4, 5, 6, 7]), add=[new("a", list(range(16)))])
    inputs = step(
        batch,
        share("b", 0, 2, [9], sample=True),
        share("c", 0, 9, [1, 2, 3], sample=True),
        add=[new("b", [1, 2]), new("c", list(range(9)))],
        drop=["a"],
    )
    assert inputs.block_table.tolist() == [[9, 0, 0], [1, 2, 3]]
    assert inputs.token_ids.tolist() == [1, 2, *range(9)]


def test_a_preempted_request_comes_back_with_its_output(batch):
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 0.25}
    step(batch, share("a", 0, 3, [4], sample=True), add=[new("a", [1, 2, 3], **penalties)])
    batch.append(np.array([0]), np.array([8]))
    back = new("a", [1, 2, 3, 8], num_prompt_tokens=3, **penalties)
    inputs = step(batch, share("a", 0, 4, [6], sample=True), add=[back], drop=["a"])
    assert inputs.token_ids.tolist() == [1, 2, 3, 8]
    assert inputs.slot_mapping.tolist() == [24, 25, 26, 27]
    logits = torch.ones(1, 10)
    batch.sampling.penalties.apply(logits, inputs.sample_rows)
    assert logits.tolist() == [[1, 0.5, 0.5, 0.5, 1, 1, 1, 1, 0.25, 1]]
    assert batch.sampling.num_output_tokens[inputs.sample_rows].tolist() == [1]


def test_tokens_that_only_the_device_knows_are_named_by_their_rows(batch):
    add = [new("a", [1, 2, 3]), new("b", [4, 5])]
    first = step(batch, share("a", 0, 3, [4], sample=True), share("b", 0, 1, [5]), add=add)
    assert first.pending.tolist() == first.pending_rows.tolist() == []
    ahead = step(batch, share("b", 1, 1, sample=True), share("a", 3, 1, sample=True))
    assert (ahead.pending.tolist(), ahead.pending_rows.tolist()) == ([1], first.sample_rows.tolist())
    batch.append(first.sample_rows, np.array([9]))
    known = step(batch, share("a", 3, 1, sample=True))
    assert (known.token_ids.tolist(), known.pending.tolist()) == ([9], [])


def test_a_row_is_owned_by_one_admission(batch):
    inputs = step(batch, share("a", 0, 2, [4], sample=True), add=[new("a", [1, 2], admission=5)])
    assert batch.is_owned(inputs.sample_rows, inputs.sample_admissions).tolist() == [True]
    for drop, add in ((["a"], []), ([], [new("a", [1, 2], admission=6)])):
        batch.update(SchedulerOutput(new_requests=add, scheduled=[], dropped_request_ids=drop, num_scheduled_tokens=0))
        assert batch.is_owned(inputs.sample_rows, inputs.sample_admissions).tolist() == [False]


def test_random_steps_equal_a_loop(batch):
    """Rows come and go at random for 200 steps; each step is recomputed token by token."""
    rng = np.random.default_rng(0)
    known = {}  # request id -> (token ids, block ids, computed)
    dropped = []
    for number in range(200):
        add, scheduled = [], []
        for request_id in [request_id for request_id in known if rng.random() < 0.15]:
            del known[request_id]
            dropped.append(request_id)
        if len(known) < 3 and rng.random() < 0.5:
            token_ids = rng.integers(0, 1000, rng.integers(1, 20)).tolist()
            known[str(number)] = (token_ids, [], 0)
            add.append(new(str(number), token_ids))
        for request_id, (token_ids, blocks, computed) in known.items():
            count = int(rng.integers(1, len(token_ids) - computed + 1))
            needed = -(-(computed + count) // BLOCK) - len(blocks)
            fresh = rng.integers(1, 99, needed).tolist()
            blocks += fresh
            sample = computed + count == len(token_ids)
            scheduled.append(share(request_id, computed, count, fresh, sample))
        if not scheduled:
            continue
        inputs = step(batch, *scheduled, add=add, drop=dropped)
        dropped = []
        expected = [
            (known[each.request_id][0][p], p, known[each.request_id][1][p // BLOCK] * BLOCK + p % BLOCK)
            for each in scheduled
            for p in range(each.num_computed_tokens, each.num_computed_tokens + each.num_scheduled_tokens)
        ]
        got = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.slot_mapping.tolist(), strict=True)
        assert list(got) == expected
        sampled = rng.integers(0, 1000, len(inputs.sample_ids))
        batch.append(inputs.sample_rows, sampled)
        for each in scheduled:
            token_ids, blocks, computed = known[each.request_id]
            if each.needs_sample:
                token_ids.append(int(sampled[inputs.sample_ids.index(each.request_id)]))
            known[each.request_id] = (token_ids, blocks, computed + each.num_scheduled_tokens)
            if len(token_ids) == 31:
                dropped.append(each.request_id)
        known = {request_id: state for request_id, state in known.items() if request_id not in dropped}
