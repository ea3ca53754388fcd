"""Sampling on a GPU, run by Triton's interpreter: every token against exact arithmetic on one row."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.sampling import SamplingParams
from engine import logprobs, sampler
from engine.kernels.gpu import penalties, sampling
from engine.kernels.gpu.ops import TritonOps
from engine.kernels.gpu.penalties import CountedPenalties
from engine.kernels.ops import TokenChoice
from engine.kernels.penalties import SparsePenalties
from engine.logprobs import RawLogprobs
from engine.sampler import sample
from engine.sampling_rows import SamplingRows
from engine.structured import language
from engine.structured.language import bits_of

SMALL = {"GROUP": 8, "CHUNK": 64, "TILE": 64, "CAPACITY": 16}
LAST_U = 1 - 2.0**-53
CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """Sizes with which a hundred ids are many chunks, and twenty candidates too many."""
    for name, value in SMALL.items():
        monkeypatch.setattr(sampling, name, value)


def choose(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, u=0.5):
    """Tokens and highest logits [rows]; each parameter is one number, or one per row."""
    logits = np.asarray(logits, np.float32)
    full = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), len(logits)).copy()  # noqa: E731
    choice = TokenChoice(
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int64),
        top_p=full(top_p, np.float64),
        min_p=full(min_p, np.float32),
        u=full(u, np.float64),
    )
    tokens, highest = sampling.choose_tokens(torch.from_numpy(logits), choice)
    return tokens.tolist(), highest.tolist()


def exact_token(logits, temperature, top_k, top_p, min_p, u):
    """The documented law on one row, in integers: weights are float32 and count in multiples of 2**-42."""
    x = np.asarray(logits, np.float32)
    if temperature == 0:
        return int(x.argmax())
    scale = np.float32(math.log2(math.e) / max(float(np.float32(temperature)), 1e-30))
    with np.errstate(over="ignore"):
        weights = np.exp2((x - x.max()) * scale)
    units = [int(float(weight) * 2**42) for weight in weights]
    bound = max(np.float32(min_p), np.float32(2.0**-42))
    if 0 < top_k < len(x):
        bound = max(bound, np.sort(weights)[-top_k])
    if top_p < 1:
        ranked = sorted((pair for pair in zip(weights, units, strict=True) if pair[0] >= bound), reverse=True)
        total = sum(unit for _, unit in ranked)
        target = max(1, min(math.ceil(float(total) * top_p), total))
        reached = np.cumsum([unit for _, unit in ranked]) >= target
        bound = max(bound, ranked[int(reached.argmax())][0])
    kept = [unit if weight >= bound else 0 for weight, unit in zip(weights, units, strict=True)]
    place = min(int(float(sum(kept)) * u), sum(kept) - 1)
    return int((np.cumsum(kept) > place).argmax())


tied = st.sampled_from([-math.inf, -30.0, -3.0, -1.0, 0.0, 1.0, 1.0000001, 2.0, 20.0])
drawn = st.floats(-20, 20, width=32)
rows_of_logits = st.integers(1, 150).flatmap(
    lambda vocab: st.sampled_from([tied, drawn]).flatmap(lambda value: st.lists(value, min_size=vocab, max_size=vocab))
)


@given(
    logits=rows_of_logits.filter(lambda row: max(row) > -math.inf),
    temperature=st.sampled_from([0.0, 1e-30, 1e-3, 0.3, 1.0, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 7, 20, 149, 150, 10**9]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.1, 1e-12, 1 - 2.0**-53]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
    u=st.one_of(st.just(0.0), st.just(LAST_U), st.floats(0, LAST_U)),
)
@settings(max_examples=40, deadline=None)
def test_tokens_are_those_of_exact_arithmetic(logits, **params):
    with mock.patch.multiple(sampling, **SMALL):
        tokens, highest = choose([logits], **params)
    assert highest == [np.float32(max(logits))]
    assert tokens == [exact_token(logits, **params)]


def test_the_whole_row_is_searched_where_the_candidates_are_too_few_or_too_many(small):
    """Candidates: weights above 2**-16, or for a small top_k those of the 13 groups' greatest; there is room for 16."""
    rng = np.random.default_rng(3)
    peaked = np.where(np.arange(100) == 70, 0.0, rng.uniform(-14, -12, 100))
    crowded, full = np.full((2, 100), -30.0)  # with u = 0 it is the least of those kept that is drawn
    crowded[40:64], full[40:56] = np.linspace(0, 1, 24), np.linspace(0, 1, 16)
    clustered = np.linspace(-2, 0, 100)
    cases = [
        *((peaked, 0, 0.9999), (crowded, 0, 0.8), (peaked, 30, 1.0), (crowded, 20, 1.0), (peaked, 30, 0.99995)),
        *((crowded, 0, 0.99), (peaked, 13, 1.0), (crowded, 12, 1.0), (full, 0, 0.8), (clustered, 13, 1.0)),
        *((full, 16, 0.9), (clustered, 0, 0.7), (full, 9, 1.0)),
    ]
    logits, top_k, top_p = (np.array(part) for part in zip(*cases, strict=True))
    for u in (0.0, LAST_U):
        expected = [exact_token(row.astype(np.float32), 1.0, k, p, 0.0, u) for row, k, p in cases]
        assert choose(logits, top_k=top_k, top_p=top_p, u=u)[0] == expected


@pytest.mark.parametrize("u", [0.0, LAST_U])
def test_ids_of_weight_0_are_never_drawn_at_either_end(small, u):
    logits = np.full((3, 100), -np.inf)
    logits[0, [31, 32]] = 0.0
    logits[1, [63, 99]] = [-3.0, 5.0]
    logits[2, [5, 40]] = [0.0, -80.0]
    assert choose(logits, u=u)[0] == ([31, 63, 5] if u == 0 else [32, 99, 5])


def test_every_border_of_chunks_can_be_drawn(small):
    ids = [0, 31, 32, 63, 64, 95, 96, 99]
    logits = np.full(100, -np.inf)
    logits[ids] = 0.0
    u = (np.arange(16) + 0.5) / 16
    assert choose([logits] * 16, u=u)[0] == np.repeat(ids, 2).tolist()


def test_rows_that_are_no_numbers_are_reported_and_leave_the_others_alone(small):
    healthy = np.random.default_rng(0).standard_normal((6, 90)).astype(np.float32)
    broken = healthy.copy()
    broken[1, 40], broken[2, 89], broken[3], broken[4, 0] = np.nan, np.inf, -np.inf, -np.inf
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.8, "top_k": 70}):
        tokens, highest = choose(broken, **params)
        assert np.isfinite(highest).tolist() == [True, False, False, False, True, True]
        assert all(0 <= token < 90 for token in tokens)
        alone, _ = choose(broken[[0, 4, 5]], **params)
        assert [tokens[row] for row in (0, 4, 5)] == alone


def test_a_row_alone_has_the_token_that_it_has_among_others(small):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((8, 200)).astype(np.float32) * 3
    params = {
        "temperature": [0.0, 1.0, 0.7, 1.5, 1.0, 0.0, 1.0, 1.0],
        "top_k": [0, 0, 5, 120, 0, 3, 40, 0],
        "top_p": [1.0, 1.0, 1.0, 0.9, 0.99, 0.5, 0.6, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.2],
        "u": rng.random(8),
    }
    tokens, _ = choose(logits, **params)
    for row in range(8):
        own = {name: values[row] for name, values in params.items()}
        assert choose(logits[row : row + 1], **own)[0] == [tokens[row]] == [exact_token(logits[row], **own)]


def test_a_vocabulary_of_50000():
    """A peaked row, a flatter one, one of a small top_k, and one whose nucleus is a third of the vocabulary."""
    logits = np.random.default_rng(2).standard_normal((4, 50_001)).astype(np.float32)
    logits *= np.array([[6], [3], [1], [0.1]], np.float32)
    params = {
        "temperature": [1.0, 2.0, 1.0, 1.0],
        "top_k": [0, 0, 60, 40_000],
        "top_p": [0.9, 0.97, 1.0, 0.4],
        "min_p": np.zeros(4),
        "u": [0.3, 0.5, 0.9, 0.999],
    }
    expected = [exact_token(row, *(values[index] for values in params.values())) for index, row in enumerate(logits)]
    assert choose(logits, **params)[0] == expected


def test_logits_are_left_as_they_are(small):
    logits = torch.randn(2, 100)
    before = logits.clone()
    TritonOps(num_heads=1, num_kv_heads=1, head_dim=16, norm_eps=1e-5).choose_tokens(logits, _choice(2))
    assert logits.equal(before)


def _choice(rows):
    return TokenChoice(
        np.ones(rows, np.float32), np.full(rows, 5), np.full(rows, 0.5), np.zeros(rows, np.float32), np.full(rows, 0.5)
    )


def test_a_greedy_step_uploads_nothing(small, monkeypatch):
    monkeypatch.setattr(sampling, "upload", None)
    assert choose([[0.0, 2.0, 2.0]], temperature=0, top_k=2, top_p=0.5)[0] == [1]


VOCAB = 40
ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)
penalty_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.1]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.3]),
)


@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_penalties_equal_those_of_the_host_whatever_the_rows_go_through(data, seed):
    """Requests come, grow, are preempted and come back into other rows, and end."""
    rng = np.random.default_rng(seed)
    host, device = SparsePenalties(), CountedPenalties(VOCAB, CPU)
    requests: dict[int, tuple] = {}  # row -> parameters, prompt, output
    for _ in range(data.draw(st.integers(1, 6))):
        free = sorted(set(range(6)) - requests.keys())
        row = data.draw(st.integers(0, 5))
        if row in requests:
            request = requests.pop(row)
            for each in (host, device):
                each.clear(row)
            if data.draw(st.booleans()):  # it was preempted, and returns
                row = data.draw(st.sampled_from(free or [row]))
                requests[row] = request
        else:
            requests[row] = (data.draw(penalty_params), data.draw(ids), data.draw(ids))
        if row in requests:
            params, prompt, output = requests[row]
            for each in (host, device):
                each.put(row, params, np.array(prompt, np.int32), np.array(output, np.int32))
        if not requests:
            continue
        rows = rng.permutation(sorted(requests))[: rng.integers(1, len(requests) + 1)]
        logits = torch.from_numpy(rng.standard_normal((len(rows), VOCAB)).astype(np.float32))
        logits[0, :2] = torch.tensor([-math.inf, 0.0])
        left, right = logits.clone(), logits.clone()
        host.apply(left, rows)
        device.apply(right, rows)
        assert left.equal(right)
        chosen = torch.from_numpy(rng.integers(0, VOCAB, len(rows)))
        for each in (host, device):
            each.append(rows, chosen)
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            requests[row][2].append(token)


def test_rows_without_penalties_take_no_memory():
    state = CountedPenalties(VOCAB, CPU)
    for row in range(9):
        state.put(row, SamplingParams(), np.arange(3), np.arange(2))
    assert state.num_bytes == 0
    for row in range(5):
        state.put(row, SamplingParams(presence_penalty=1.0), np.arange(3), np.arange(2))
    assert state.num_bytes == 8 * VOCAB * 4
    for row in range(5):
        state.clear(row)
        state.put(row + 5, SamplingParams(presence_penalty=1.0), np.arange(3), np.arange(2))
    assert state.num_bytes == 8 * VOCAB * 4


def test_logprobs_do_not_depend_on_who_else_asks():
    logits = torch.randn(4, 100)
    tokens = torch.tensor([3, 50, 99, 0])
    everyone = RawLogprobs(logits, np.full(4, 2), [(7,)] * 4).of(tokens)
    for row in range(4):
        counts = np.where(np.arange(4) == row, 2, -1)
        alone = RawLogprobs(logits, counts, [(7,)] * 4).of(tokens)
        assert all(alone[name].equal(everyone[name][row : row + 1]) for name in everyone)


class _Unlaunched:
    def __getitem__(self, grid):
        return lambda *args, **options: None


def test_no_step_of_sampling_waits_for_the_device(monkeypatch):
    """On tensors without memory: whatever asks the device for a value or for a number of elements raises."""
    meta = torch.device("meta")
    for module in (sampler, sampling, penalties, language, logprobs):
        monkeypatch.setattr(module, "upload", lambda arrays, device: [torch.from_numpy(a).to(device) for a in arrays])
    for module in (sampling, penalties):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, _Unlaunched())
    ops = TritonOps(num_heads=1, num_kv_heads=1, head_dim=16, norm_eps=1e-5)
    table = SamplingRows(4, ops.make_penalties(1000, meta))
    params = [
        SamplingParams(temperature=0, logprobs=3, logprob_token_ids=(5,), logit_bias={1: 2.0}, allowed_token_ids=(1,)),
        SamplingParams(top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.1, bad_sequences=((1, 2), (3,))),
        SamplingParams(presence_penalty=1.0, min_tokens=4),
        SamplingParams(),
    ]
    for row, each in enumerate(params):
        arrays = {"prompt_token_ids": np.array([1, 2]), "output_token_ids": np.array([3])}
        table.put(row, each, seed=row, stop_token_ids=(9,), **arrays)
    table.matchers[3] = mock.Mock(allowed=bits_of([1, 2], 1000))
    for _ in range(2):
        pending = sample(torch.empty(4, 1000, device=meta), table, np.arange(4), ops)
        assert pending.token_ids.shape == (4,)
