"""In float32 a request's tokens do not depend on what else happens: mates, chunks, cache, preemption, cancels."""

import pytest

from configs.errors import UsageError
from configs.sampling import SamplingParams
from tests.engine.core_runs import add, finish, make_core, random_prompts, token_ids
from tests.engine.tiny_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=24)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=1234)
PROMPTS = random_prompts(12)
UNUSED_ID = 271  # ends nothing: the requests of these tests have no end-of-sequence id


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def core(folder):
    return make_core(folder, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(core):
    """Greedy ids of each prompt run by itself."""
    return [token_ids(core, [prompt], GREEDY)[0] for prompt in PROMPTS]


def test_greedy_equals_transformers(folder, alone):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for prompt, expected in zip(PROMPTS[:4], alone, strict=False):
        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=[UNUSED_ID],
                pad_token_id=0,
            )
        assert ids[0, len(prompt) :].tolist() == expected


def test_batched_equals_alone(core, alone):
    assert token_ids(core, PROMPTS, GREEDY) == alone


def test_mates_that_sample_change_nothing(core, alone):
    params = [GREEDY if index % 2 else SamplingParams(top_k=7, max_tokens=40) for index in range(len(PROMPTS))]
    assert token_ids(core, PROMPTS, params)[1::2] == alone[1::2]


@pytest.mark.parametrize("chunk", [1, 16, 17, 64, 512])
@pytest.mark.parametrize("block_size", [1, 16])
def test_chunked_equals_whole(folder, alone, chunk, block_size):
    core = make_core(folder, max_num_batched_tokens=chunk, block_size=block_size, max_num_seqs=min(chunk, 8))
    assert token_ids(core, PROMPTS, GREEDY) == alone


def test_a_rounded_cache_changes_nothing_with_mates_chunks_or_preemption(folder):
    """8-bit keys and values: other tokens than in float32, but the same in every way of computing them."""
    rounded = {"kv_cache_dtype": "int8", "attention_backend": "cpu"}
    core = make_core(folder, **rounded, enable_prefix_caching=False)
    assert core.ready.kv_cache_dtype == "int8"
    alone = [token_ids(core, [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert token_ids(core, PROMPTS, GREEDY) == alone
    for settings in ({"max_num_batched_tokens": 17}, {"kv_cache_tokens": 256}):
        other = make_core(folder, **rounded, max_num_seqs=8, **settings)
        assert token_ids(other, PROMPTS, GREEDY) == alone
        assert token_ids(other, PROMPTS, GREEDY) == alone  # from the prefix cache


def test_a_rounded_cache_needs_a_backend_that_has_one(folder):
    with pytest.raises(UsageError, match=r"cpu cannot be used: keeps no .*float8_e4m3fn cache"):
        make_core(folder, kv_cache_dtype="fp8_e4m3", attention_backend="cpu")


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_cached_equals_fresh(folder, core, length):
    prompt = random_prompts(1, lengths=(length, length), seed=length)[0]
    cold = token_ids(core, [prompt], GREEDY)
    cached = make_core(folder)
    assert token_ids(cached, [prompt], GREEDY) == cold
    for _ in range(2):
        assert token_ids(cached, [prompt], GREEDY) == cold
    add(cached, "counted", prompt, GREEDY)
    assert finish(cached)["counted"].num_cached_tokens == (length - 1) // 16 * 16


def test_shared_prefixes_of_whole_blocks(folder, core):
    for blocks in (1, 2, 3):
        prefix = random_prompts(1, lengths=(16 * blocks, 16 * blocks), seed=blocks)[0]
        prompts = [prefix + tail for tail in random_prompts(6, lengths=(1, 20), seed=90 + blocks)]
        assert token_ids(make_core(folder), prompts, GREEDY) == token_ids(core, prompts, GREEDY)


def test_sixteen_identical_prompts_at_once(folder, core):
    prompt = random_prompts(1, lengths=(500, 500))[0]
    cold = token_ids(core, [prompt], GREEDY)
    fresh = make_core(folder, max_num_batched_tokens=64)
    assert token_ids(fresh, [prompt] * 16, GREEDY) == cold * 16


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_preempted_equals_undisturbed(folder, core, caching, params):
    """Eight requests whose outputs together need about three times the cache."""
    prompts = random_prompts(8, lengths=(20, 40), seed=3)
    params = SamplingParams(**{**_fields(params), "max_tokens": 120})
    tight = make_core(folder, kv_cache_tokens=400, enable_prefix_caching=caching, max_num_batched_tokens=64)
    preemptions = _count_preemptions(tight)
    assert token_ids(tight, prompts, params) == [token_ids(core, [prompt], params)[0] for prompt in prompts]
    assert len(preemptions) > 3


def test_penalties_survive_preemption(folder, core):
    prompts = random_prompts(6, lengths=(20, 40), seed=4)
    params = SamplingParams(
        temperature=0,
        max_tokens=120,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        min_tokens=90,
    )
    tight = make_core(folder, kv_cache_tokens=320)
    preemptions = _count_preemptions(tight)
    assert token_ids(tight, prompts, params) == [token_ids(core, [prompt], params)[0] for prompt in prompts]
    assert preemptions


def test_seeded_requests_do_not_depend_on_mates(core):
    solo = [token_ids(core, [prompt], DRAWN)[0] for prompt in PROMPTS[:4]]
    mates = [SamplingParams(max_tokens=30)] * 4
    assert token_ids(core, PROMPTS[:8], [DRAWN] * 4 + mates)[:4] == solo
    assert token_ids(core, PROMPTS[:1] * 8, DRAWN) == solo[:1] * 8


def test_unseeded_requests_differ(core):
    outputs = token_ids(core, PROMPTS[:1] * 6, SamplingParams(max_tokens=12))
    assert len({tuple(output) for output in outputs}) == 6


def test_the_engine_seed_repeats_a_run(folder):
    params = SamplingParams(max_tokens=12)
    runs = [token_ids(make_core(folder, seed=seed), PROMPTS[:3], params) for seed in (5, 5, 6)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_cancelling_a_third_leaves_the_others_as_they_are(folder, core):
    """Requests share a prefix, a third is aborted while decoding and sent again, strangers run beside them."""
    prefix = random_prompts(1, lengths=(40, 40), seed=7)[0]
    shared = [prefix + tail for tail in random_prompts(12, lengths=(3, 20), seed=8)]
    strangers = random_prompts(6, lengths=(10, 60), seed=9)
    busy = make_core(folder, kv_cache_tokens=900, max_num_batched_tokens=96)
    for index, prompt in enumerate(shared + strangers):
        add(busy, str(index), prompt, GREEDY)
    outputs = [output for _ in range(9) for output in busy.step()]
    aborted = [str(index) for index in range(0, 12, 3)]
    assert {output.request_id for output in outputs} >= set(aborted)
    busy.abort_requests(aborted)
    for request_id in aborted:
        add(busy, f"again {request_id}", shared[int(request_id)], GREEDY)
    results = finish(busy, [output for output in outputs if output.request_id not in aborted])
    for index, prompt in enumerate(shared + strangers):
        request_id = f"again {index}" if str(index) in aborted else str(index)
        assert results[request_id].new_token_ids == token_ids(core, [prompt], GREEDY)[0]


def _fields(params):
    return {name: getattr(params, name) for name in params.__struct_fields__}


def _count_preemptions(core):
    """A list that grows with every preemption."""
    seen = []
    preempt = core.scheduler._preempt
    core.scheduler._preempt = lambda request: (seen.append(request.request_id), preempt(request))
    return seen


@pytest.mark.parametrize("backend", ["cpu", "torch_reference"])
def test_prompts_that_share_a_prefix_in_one_step_get_what_they_get_alone(folder, backend):
    prefix = PROMPTS[0] * 12
    prompts = [prefix[:500], *(prefix[:500] + PROMPTS[index % 3][:index] for index in range(15))]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5)
    alone = []
    for prompt in prompts:
        core = make_core(folder, attention_backend=backend, enable_prefix_caching=False, max_num_batched_tokens=1024)
        add(core, "one", prompt, params)
        alone.append(finish(core)["one"])
    core = make_core(folder, attention_backend=backend, max_num_batched_tokens=8192)
    before = core.stats().counters.num_step_tokens
    for index, prompt in enumerate(prompts):
        add(core, str(index), prompt, params)
    outputs = core.step()
    assert core.stats().counters.num_step_tokens - before == sum(map(len, prompts)) - 15 * 496
    together = finish(core, outputs)
    for index, expected in enumerate(alone):
        output = together[str(index)]
        assert output.new_token_ids == expected.new_token_ids
        assert backend != "cpu" or output.logprobs == expected.logprobs
