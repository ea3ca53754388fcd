"""Whole outputs of a tiny checkpoint under sampling parameters: equalities, and transformers as the oracle."""

import math

import pytest
import torch

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from engine.llm import LLM
from tests.engine.core_runs import random_prompts
from tests.engine.tiny_models import VOCAB_SIZE, write_tiny

NUM_TOKENS = 24
PADDED_ID = 270  # the checkpoint's vocabulary is larger than its tokenizer's
SETTINGS = {"dtype": "float32", "attention_backend": "torch_reference", "kv_cache_tokens": 4096, "num_threads": 1}
PROMPTS = random_prompts(4, lengths=(8, 30), seed=21)


def params(**fields):
    return SamplingParams(**({"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | fields))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder):
    return write_tiny(folder)


@pytest.fixture(scope="module")
def llm(folder, model):
    return LLM(str(folder), **SETTINGS)


@pytest.fixture(scope="module")
def greedy(llm):
    return ids_of(llm)


def ids_of(llm, **fields):
    return [request.outputs[0].token_ids for request in llm.generate(PROMPTS, params(**fields))]


def logits_after(model, ids):
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    return logits.double().clone()


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-30])
def test_sampling_tends_to_greedy_as_the_temperature_tends_to_zero(llm, greedy, temperature):
    assert ids_of(llm, temperature=temperature, seed=3) == greedy


@pytest.mark.parametrize("fields", [{"top_p": 1e-6}, {"top_p": 1e-12}, {"top_k": 1}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(llm, greedy, fields):
    assert ids_of(llm, temperature=1.0, seed=3, **fields) == greedy


@pytest.mark.parametrize("top_k", [0, -1, VOCAB_SIZE, 10 * VOCAB_SIZE])
def test_top_k_that_limits_nothing_changes_nothing(llm, greedy, top_k):
    drawn = {"temperature": 1.0, "seed": 5}
    assert ids_of(llm, **drawn, top_k=top_k) == ids_of(llm, **drawn) != greedy
    assert ids_of(llm, top_k=top_k) == greedy


def test_greedy_and_limited_rows_share_a_batch(llm, greedy):
    limited = params(temperature=1.0, top_k=5, seed=9)
    alone = [llm.generate([prompt], limited)[0].outputs[0].token_ids for prompt in PROMPTS]
    mixed = llm.generate([*PROMPTS, *PROMPTS], [params(top_k=5)] * 4 + [limited] * 4)
    assert [request.outputs[0].token_ids for request in mixed] == greedy + alone


@pytest.mark.parametrize(
    "neutral", [{"presence_penalty": 0.0}, {"frequency_penalty": 0.0}, {"repetition_penalty": 1.0}, {"logit_bias": {}}]
)
def test_neutral_values_change_nothing(llm, greedy, neutral):
    assert ids_of(llm, **neutral) == greedy
    drawn = {"temperature": 1.0, "seed": 5}
    assert ids_of(llm, **drawn, **neutral) == ids_of(llm, **drawn)


@pytest.mark.parametrize("penalty", [1.2, 0.8])
def test_repetition_penalty_equals_transformers(llm, model, greedy, penalty):
    ids = ids_of(llm, repetition_penalty=penalty)
    assert ids != greedy
    for prompt, ours in zip(PROMPTS, ids, strict=True):
        with torch.inference_mode():
            theirs = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                repetition_penalty=penalty,
                eos_token_id=[PADDED_ID + 1],
                pad_token_id=0,
            )
        assert theirs[0, len(prompt) :].tolist() == ours


def test_other_penalties_count_the_output_alone(llm, model, greedy):
    """logit - frequency * count - presence * (count > 0), replayed on the logits of transformers."""
    repeated = next(i for i, token_id in enumerate(greedy[0]) if token_id in greedy[0][:i])
    prompt = PROMPTS[0] + greedy[0][:repeated]  # its first output token is one of its own
    [request] = llm.generate([prompt], params(presence_penalty=2, frequency_penalty=2))
    ours = request.outputs[0].token_ids
    for position, token_id in enumerate(ours):
        logits = logits_after(model, prompt + ours[:position])
        for earlier in set(ours[:position]):
            logits[earlier] -= 2 * ours[:position].count(earlier) + 2
        assert int(logits.argmax()) == token_id
    assert ours[0] == greedy[0][repeated]
    assert len(set(ours)) > NUM_TOKENS // 2


def test_biases_hold_at_every_step(llm, greedy):
    assert ids_of(llm, logit_bias={77: 100.0}) == [[77] * NUM_TOKENS] * 4
    banned = set(greedy[0])
    for ids in ids_of(llm, logit_bias=dict.fromkeys(banned, -100.0)):
        assert not banned & set(ids)


def test_a_bad_sequence_loses_its_last_id_behind_the_others_alone(llm, model, greedy):
    """Replayed on the logits of transformers: the likeliest id that completes none."""
    bad = (tuple(greedy[0][:2]), tuple(greedy[0][2:5]), (greedy[0][5],))
    [request] = llm.generate([PROMPTS[0]], params(bad_sequences=bad))
    ours = request.outputs[0].token_ids
    for position, token_id in enumerate(ours):
        logits = logits_after(model, PROMPTS[0] + ours[:position])
        for *before, last in bad:
            if position >= len(before) and ours[position - len(before) : position] == before:
                logits[last] = -math.inf
        assert int(logits.argmax()) == token_id
    assert ours[0] == greedy[0][0]
    assert ours[1] != greedy[0][1]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 0.5, "seed": 1}, {"temperature": 2.0, "top_p": 0.1, "top_k": 3}]
)
def test_logprobs_are_the_models_whatever_is_sampled(llm, model, fields):
    [request] = llm.generate([PROMPTS[1]], params(**fields, max_tokens=4, logprobs=5, logit_bias={77: 3.0}))
    output = request.outputs[0]
    for position, entry in enumerate(output.logprobs):
        expected = logits_after(model, PROMPTS[1] + output.token_ids[:position]).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-4)


def test_every_choice_of_a_seed_can_be_reproduced_and_differs(llm):
    drawn = params(temperature=1.0, seed=11, n=4, ignore_eos=False)
    first, again = (llm.generate([PROMPTS[0]], drawn)[0].outputs for _ in range(2))
    assert first == again
    assert len({tuple(output.token_ids) for output in first}) == 4


def test_ids_without_a_token_have_no_text_and_end_nothing(llm):
    fields = {"logit_bias": {PADDED_ID: 100.0}, "max_tokens": 6, "logprobs": 1}
    for skip in (True, False):
        output = llm.generate([PROMPTS[0]], params(**fields, skip_special_tokens=skip))[0].outputs[0]
        assert (output.token_ids, output.text, output.finish_reason) == ([PADDED_ID] * 6, "", "length")
        assert all(math.isfinite(entry.logprob) for entry in output.logprobs)


def test_whatever_is_drawn_has_a_text(llm):
    """Tokens of single bytes, special tokens and ids without one, nearly uniform: never an error."""
    drawn = [params(temperature=2.0, seed=seed, max_tokens=200) for seed in range(24)]
    for request in llm.generate([[3 + seed] for seed in range(24)], drawn):
        output = request.outputs[0]
        assert len(output.token_ids) == 200
        assert output.text == llm.tokenizer.decode(output.token_ids)


def test_stop_strings_end_requests_of_a_batch_as_alone(llm):
    texts = [request.outputs[0].text for request in llm.generate(PROMPTS, params())]
    each = [params(stop=(text[5:7],), max_tokens=NUM_TOKENS) for text in texts]
    together = [request.outputs for request in llm.generate(PROMPTS, each)]
    alone = [llm.generate([prompt], own)[0].outputs for prompt, own in zip(PROMPTS, each, strict=True)]
    assert together == alone
    assert [output.text for [output] in together] == [text.split(text[5:7])[0] for text in texts]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -2},
        {"top_p": 0},
        {"top_p": -0.1},
        {"min_p": 1.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": math.nan},
        {"min_p": math.nan},
        {"presence_penalty": math.nan},
        {"frequency_penalty": 2.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.nan},
        {"logit_bias": {5: 1e9}},
        {"logit_bias": {5: math.nan}},
    ],
)
def test_values_without_a_meaning_are_refused(fields):
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**fields)
    assert refusal.value.param == next(iter(fields))


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 99_999_999, -1])
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "bad_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused(llm, name, token_id):
    ids = {token_id: 5.0} if name == "logit_bias" else (token_id,)
    with pytest.raises(InvalidRequest, match=str(token_id)) as refusal:
        llm.generate([PROMPTS[0]], params(**{name: ids}))
    assert refusal.value.param == name
