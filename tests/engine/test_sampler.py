"""The sampler against a plain numpy model of one row, and row by row against itself."""

import numpy as np
import pytest
import torch

from configs.sampling import SamplingParams
from engine.kernels.cpu.ops import CPUOps
from engine.kernels.gpu import sampling
from engine.kernels.gpu.ops import TritonOps
from engine.kernels.torch_ops import TorchOps
from engine.logprobs import LOWEST_LOGPROB
from engine.sampler import Sampled, sample, uniform
from engine.sampling_rows import SamplingRows

VOCAB = 700


def make_rows(params, *, seeds=None, prompts=None, outputs=None, stop_token_ids=frozenset()):
    table = SamplingRows(len(params), chosen_ops.make_penalties(VOCAB, torch.device("cpu")))
    for row, each in enumerate(params):
        table.put(
            row,
            each,
            seed=seeds[row] if seeds else row,
            stop_token_ids=stop_token_ids,
            prompt_token_ids=np.array(prompts[row] if prompts else [], np.int64),
            output_token_ids=np.array(outputs[row] if outputs else [], np.int64),
        )
    return table


SHAPE = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "norm_eps": 1e-5}
OPS = {"torch": TorchOps(**SHAPE), "cpu": CPUOps(**SHAPE, dtype=torch.float32), "triton": TritonOps(**SHAPE)}


COMPILED = ["torch", "cpu"]
"""For tests of more rows than Triton's interpreter gets through."""


@pytest.fixture(autouse=True, params=OPS)
def ops(request, monkeypatch):
    """Every test runs on all implementations of `choose_tokens` and of the penalties."""
    global chosen_ops
    chosen_ops = OPS[request.param]
    if request.param == "triton":
        for name, value in {"GROUP": 64, "CHUNK": 1024, "CAPACITY": 256}.items():
            monkeypatch.setattr(sampling, name, value)


def run(logits, params, **state) -> Sampled:
    table = make_rows(params, **state)
    return sample(torch.tensor(logits, dtype=torch.float32), table, np.arange(len(params)), chosen_ops).wait()


def model_weights(logits, p: SamplingParams, prompt=(), output=(), stop_token_ids=()):
    """Unnormalised probabilities of one row, straight from the documented order of operations."""
    x = np.array(logits, np.float64)
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    if p.allowed_token_ids:
        x[[token for token in range(len(x)) if token not in p.allowed_token_ids]] = -np.inf
    x[list(p.bad_token_ids)] = -np.inf
    for *before, last in p.bad_sequences:
        if list(output)[len(output) - len(before) :] == before:
            x[last] = -np.inf
    if len(output) < p.min_tokens:
        x[list(stop_token_ids)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * list(output).count(token) + p.presence_penalty
    if p.temperature == 0:
        return (np.arange(len(x)) == x.argmax()).astype(float)
    w = np.exp((x - x.max()) / p.temperature)
    w[w < p.min_p] = 0
    if 0 < p.top_k < len(w):
        w[w < np.sort(w)[-p.top_k]] = 0
    if p.top_p < 1:
        ranked = np.sort(w)[::-1]
        w[w < ranked[np.searchsorted(ranked.cumsum(), p.top_p * w.sum())]] = 0
    return w


def model_token(weights, u):
    return int(np.searchsorted(weights.cumsum(), u * weights.sum(), side="right"))


def random_params(rng) -> SamplingParams:
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    return SamplingParams(
        temperature=pick(0.0, 0.3, 0.7, 1.0, 1.9),
        top_k=pick(0, -1, 1, 5, 40, 300, VOCAB - 1, VOCAB, 10 * VOCAB),
        top_p=pick(1.0, 1.0, 0.95, 0.5, 0.1, 1e-6, 0.999),
        min_p=pick(0.0, 0.0, 0.01, 0.3, 1.0),
        presence_penalty=pick(0.0, 0.0, 1.3, -0.7),
        frequency_penalty=pick(0.0, 0.0, 0.4, -0.5),
        repetition_penalty=pick(1.0, 1.0, 1.2, 0.8),
        logit_bias=pick(None, None, {3: 100.0, 5: -100.0}, {7: 2.5}),
        bad_token_ids=pick((), (1, 2, 3)),
        allowed_token_ids=pick((), (), tuple(range(0, VOCAB, 3))),
        bad_sequences=pick((), ((40,), (5, 9, 12), (9, 300), (9, 301))),
        min_tokens=pick(0, 12),
        max_tokens=None,
    )


@pytest.mark.parametrize("trial", range(12))
def test_mixed_rows_equal_the_plain_model(trial):
    rng = np.random.default_rng(trial)
    count = 3 if isinstance(chosen_ops, TritonOps) else 24
    logits = (rng.standard_normal((count, VOCAB)) * rng.choice([0.2, 2, 6], (count, 1))).astype(np.float32)
    params = [random_params(rng) for _ in range(count)]
    prompts = [rng.integers(0, VOCAB, 30).tolist() for _ in params]
    outputs = [rng.integers(0, VOCAB, rng.integers(0, 25)).tolist() for _ in params]
    seeds = [int(s) for s in rng.integers(0, 2**63, count)]
    result = run(logits, params, seeds=seeds, prompts=prompts, outputs=outputs, stop_token_ids={9, 11})
    assert not result.failed.any()
    for row, each in enumerate(params):
        weights = model_weights(logits[row], each, prompts[row], outputs[row], (9, 11))
        u = uniform(np.array([seeds[row]], np.uint64), np.array([len(outputs[row])], np.uint64))[0]
        assert result.token_ids[row] == model_token(weights, u), each


def test_rows_do_not_depend_on_each_other():
    rng = np.random.default_rng(1)
    count = 5 if isinstance(chosen_ops, TritonOps) else 40
    logits = rng.standard_normal((count, VOCAB)).astype(np.float32) * 3
    params = [random_params(rng) for _ in range(count)]
    outputs = [[5, 5, 9]] * count
    together = run(logits, params, seeds=list(range(count)), outputs=outputs).token_ids
    for row in range(count):
        alone = run(logits[row : row + 1], [params[row]], seeds=[row], outputs=outputs[:1])
        assert alone.token_ids[0] == together[row]


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-8, 1e-30, 1e-46, 1e-300])
def test_tiny_temperatures_tend_to_greedy(temperature):
    logits = np.random.default_rng(2).standard_normal((8, VOCAB)).astype(np.float32)
    tiny = run(logits, [SamplingParams(temperature=temperature)] * 8)
    assert tiny.token_ids.tolist() == logits.argmax(1).tolist()


def test_greedy_takes_the_lowest_id_of_equals():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [40, 600]] = 1.0
    assert run(logits, [SamplingParams(temperature=0)] * 2).token_ids.tolist() == [0, 40]


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 10 * VOCAB])
def test_top_k_off_keeps_all(top_k):
    logits = np.random.default_rng(3).standard_normal((16, VOCAB)).astype(np.float32)
    off = run(logits, [SamplingParams()] * 16)
    assert run(logits, [SamplingParams(top_k=top_k)] * 16).token_ids.tolist() == off.token_ids.tolist()


@pytest.mark.parametrize("params", [{"top_p": 1e-6}, {"top_p": 1e-12}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_likeliest_token_always_stays(params):
    logits = np.random.default_rng(4).standard_normal((6, VOCAB)).astype(np.float32)
    assert run(logits, [SamplingParams(**params)] * 6).token_ids.tolist() == logits.argmax(1).tolist()


def test_a_wide_nucleus_falls_back_on_the_whole_vocabulary():
    """A flat distribution over more tokens than the first look covers."""
    vocab = 5000
    logits = np.random.default_rng(5).standard_normal((3, vocab)).astype(np.float32) * 0.1
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.5, top_k=4000), SamplingParams()]
    result = run(logits, params)
    for row, each in enumerate(params):
        u = uniform(np.array([row], np.uint64), np.array([0], np.uint64))[0]
        assert result.token_ids[row] == model_token(model_weights(logits[row], each), u)


@pytest.mark.parametrize("ops", COMPILED, indirect=True)
def test_draws_follow_the_distribution():
    """Chi-squared over 20,000 seeds; the bound is the 1 - 1e-6 quantile for 9 degrees of freedom."""
    logits = np.tile(np.linspace(-1, 2, 10, dtype=np.float32), (20_000, 1))
    drawn = run(logits, [SamplingParams()] * 20_000).token_ids
    expected = np.exp(logits[0]) / np.exp(logits[0]).sum() * 20_000
    assert (((np.bincount(drawn, minlength=10) - expected) ** 2) / expected).sum() < 45


@pytest.mark.parametrize("ops", COMPILED[:1], indirect=True)
def test_uniform_numbers_differ_by_seed_and_position():
    seeds, places = np.meshgrid(np.arange(100, dtype=np.uint64), np.arange(100, dtype=np.uint64))
    u = uniform(seeds.ravel(), places.ravel())
    assert len(np.unique(u)) == 10_000
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.05
    assert uniform(np.array([2**64 - 1], np.uint64), np.array([2**64 - 1], np.uint64))[0] < 1


@pytest.mark.parametrize("ops", COMPILED, indirect=True)
def test_a_token_of_weight_zero_is_never_drawn():
    logits = np.full((2000, VOCAB), -200.0, np.float32)
    logits[:, [100, 699]] = 0.0
    assert set(run(logits, [SamplingParams()] * 2000).token_ids.tolist()) == {100, 699}


def test_equal_seeds_draw_equal_tokens_and_choices_differ():
    logits = np.tile(np.random.default_rng(6).standard_normal(VOCAB).astype(np.float32), (8, 1))
    same = run(logits, [SamplingParams(seed=7)] * 8, seeds=[7] * 8)
    assert len(set(same.token_ids.tolist())) == 1
    choices = [SamplingParams(seed=7, n=8).for_choice(index) for index in range(8)]
    apart = run(logits, choices, seeds=[choice.seed for choice in choices])
    assert len(set(apart.token_ids.tolist())) > 4


def test_repetition_penalty_counts_the_prompt_and_the_others_do_not():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 5], logits[:, 6] = 2.0, 1.5
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2),
        SamplingParams(temperature=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1.0),
    ]
    assert run(logits, params, prompts=[[5, 5, 5]] * 3).token_ids.tolist() == [6, 5, 5]
    assert run(logits, params, outputs=[[5]] * 3).token_ids.tolist() == [6, 6, 5]


def test_repetition_penalty_multiplies_negative_logits():
    logits = np.full((1, VOCAB), -4.0, np.float32)
    logits[0, 5], logits[0, 6] = -2.0, -2.5
    assert run(logits, [SamplingParams(temperature=0, repetition_penalty=1.5)], prompts=[[5]]).token_ids[0] == 6


def test_appended_tokens_are_counted_as_if_they_had_been_there():
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, temperature=0.9)
    rng = np.random.default_rng(7)
    output = rng.integers(0, VOCAB, 200)
    grown = make_rows([params], prompts=[[1, 2]])
    for token in output:
        grown.advance(np.array([0]), torch.tensor([token]))
    fresh = make_rows([params], prompts=[[1, 2]], outputs=[output])
    logits = torch.from_numpy(rng.standard_normal((1, VOCAB)).astype(np.float32))
    one, other = logits.clone(), logits.clone()
    grown.penalties.apply(one, np.arange(1))
    fresh.penalties.apply(other, np.arange(1))
    assert one.equal(other)
    assert not one.equal(logits)
    one, other = (sample(logits.clone(), table, np.arange(1), chosen_ops).wait() for table in (grown, fresh))
    assert one.token_ids.tolist() == other.token_ids.tolist()


def test_logit_bias_and_bad_ids():
    logits = np.random.default_rng(8).standard_normal((3, VOCAB)).astype(np.float32)
    best = int(logits[1].argmax())
    params = [
        SamplingParams(temperature=0, logit_bias={17: 100.0}),
        SamplingParams(temperature=0, logit_bias={best: -100.0}),
        SamplingParams(temperature=0, bad_token_ids=(int(logits[2].argmax()),)),
    ]
    second = np.argsort(logits, 1)[:, -2]
    assert run(logits, params).token_ids.tolist() == [17, second[1], second[2]]


def test_stop_ids_are_held_off_by_what_the_device_has_chosen():
    """`min_tokens` counts the token that the host does not know yet."""
    logits = torch.zeros(1, VOCAB)
    logits[:, 9] = 5.0
    table = make_rows([SamplingParams(temperature=0, min_tokens=2)], stop_token_ids={9})
    steps = [sample(logits.clone(), table, np.arange(1), chosen_ops) for _ in range(3)]
    assert [int(step.wait().token_ids[0]) for step in steps] == [0, 0, 9]


def test_penalties_count_what_the_device_has_chosen():
    logits = torch.zeros(1, VOCAB)
    logits[:, [5, 9]] = torch.tensor([3.0, 2.0])
    table = make_rows([SamplingParams(temperature=0, presence_penalty=2.0)])
    steps = [sample(logits.clone(), table, np.arange(1), chosen_ops) for _ in range(3)]
    assert [int(step.wait().token_ids[0]) for step in steps] == [5, 9, 5]


def test_stop_ids_are_held_off_until_min_tokens():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 9] = 5.0
    params = [SamplingParams(temperature=0, min_tokens=2)] * 2
    result = run(logits, params, outputs=[[1], [1, 1]], stop_token_ids={9})
    assert result.token_ids.tolist() == [0, 9]


def test_logprobs_are_those_of_the_model():
    logits = np.random.default_rng(9).standard_normal((4, VOCAB)).astype(np.float32)
    params = [
        SamplingParams(temperature=0, logprobs=5, logit_bias={3: 50.0}),
        SamplingParams(temperature=2.0, top_p=0.1, logprobs=0),
        SamplingParams(),
        SamplingParams(temperature=0.5, logprobs=20),
    ]
    result = run(logits, params)
    reference = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    for row, count in ((0, 5), (1, 0), (3, 20)):
        entry = result.logprobs[row]
        assert entry.token_id == result.token_ids[row]
        assert entry.logprob == pytest.approx(reference[row, entry.token_id], abs=1e-5)
        assert [token for token, _ in entry.top] == np.argsort(-reference[row])[:count].tolist()
    assert result.logprobs[0].token_id == 3
    assert result.logprobs[2] is None


def test_logprobs_are_finite():
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, 4] = 1.0
    entry = run(logits, [SamplingParams(temperature=0, logprobs=3)]).logprobs[0]
    assert [value for _, value in entry.top] == [0.0, LOWEST_LOGPROB, LOWEST_LOGPROB]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_numbers_fail_alone(temperature):
    logits = np.random.default_rng(10).standard_normal((5, VOCAB)).astype(np.float32)
    healthy = logits.copy()
    logits[1, 300], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    params = [SamplingParams(temperature=temperature, top_p=0.9, logprobs=1)] * 5
    result = run(logits, params)
    assert result.failed.tolist() == [False, True, True, True, False]
    assert result.token_ids[[0, 4]].tolist() == run(healthy, params).token_ids[[0, 4]].tolist()


def test_a_row_that_may_choose_nothing_fails():
    logits = np.zeros((1, VOCAB), np.float32)
    result = run(logits, [SamplingParams(bad_token_ids=tuple(range(VOCAB)))])
    assert (result.failed.tolist(), result.starved.tolist()) == ([True], [True])
    logits[0, 5] = np.nan
    assert run(logits, [SamplingParams()]).starved.tolist() == [False]


@pytest.mark.parametrize("ops", COMPILED, indirect=True)
def test_allowed_ids_are_the_only_ones_and_stop_ids_are_no_exception():
    logits = np.random.default_rng(11).standard_normal((400, VOCAB)).astype(np.float32)
    drawn = run(logits, [SamplingParams(allowed_token_ids=(7, 500, 7))] * 400, stop_token_ids={9}).token_ids
    assert set(drawn.tolist()) == {7, 500}
    params = SamplingParams(allowed_token_ids=(9,), min_tokens=2)
    assert run(logits[:1], [params], stop_token_ids={9}).failed.tolist() == [True]
    assert not run(logits[:1], [params], stop_token_ids={9}, outputs=[[1, 1]]).failed.any()


def test_a_bad_sequence_bans_its_last_id_behind_the_others():
    logits = np.zeros((6, VOCAB), np.float32)
    logits[:, 5], logits[:, 6] = 3.0, 2.0
    params = SamplingParams(temperature=0, bad_sequences=((1, 2, 5), (2, 6), (3, 5)))
    outputs = [[], [1, 2], [2, 1], [0, 2], [2, 0, 1, 2], [3]]
    result = run(logits, [params] * 6, outputs=outputs, prompts=[[1, 2]] * 6)
    assert result.token_ids.tolist() == [5, 0, 5, 5, 0, 6]
    grown = make_rows([params])
    tokens = []
    for token in (1, 2):
        tokens.append(sample(torch.tensor(logits[:1]), grown, np.arange(1), chosen_ops).wait().token_ids[0])
        grown.append(np.array([0]), np.array([token]))
    tokens.append(sample(torch.tensor(logits[:1]), grown, np.arange(1), chosen_ops).wait().token_ids[0])
    assert tokens == [5, 5, 0]


def test_wanted_logprobs_come_behind_the_likeliest():
    logits = np.random.default_rng(12).standard_normal((4, VOCAB)).astype(np.float32)
    params = [
        SamplingParams(temperature=0, logprobs=2, logprob_token_ids=(3, 699, 3)),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=1),
        SamplingParams(temperature=0, logprobs=0, logprob_token_ids=(8,)),
    ]
    result = run(logits, params)
    reference = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    best = np.argsort(-logits, 1)[:, :2].tolist()
    expected = [[*best[0], 3, 699, 3], None, best[2][:1], [8]]
    for row, ids in enumerate(expected):
        entry = result.logprobs[row]
        assert (ids is None) == (entry is None)
        if ids is not None:
            assert [token for token, _ in entry.top] == ids
            assert [value for _, value in entry.top] == pytest.approx(reference[row, ids].tolist(), abs=1e-5)
