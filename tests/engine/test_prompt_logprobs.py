"""Log-probabilities of the prompt: equal to transformers', and the same bits in every way of computing them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from configs.errors import ContextLengthExceeded, InvalidRequest
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.core import EngineCore
from engine.input_processor import InputProcessor
from engine.llm import LLM
from engine.messages import AddRequest, TokenLogprobs, TokenOutput
from tests.engine.core_runs import add, finish, make_core, random_prompts
from tests.engine.paged_runs import torch_ops
from tests.engine.tiny_models import write_tiny

PROMPTS = random_prompts(8)
LONG = random_prompts(1, lengths=(150, 150), seed=3)[0]
ASK = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3)
ASK_AND_GO_ON = SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=3, logprobs=2)
GO_ON = SamplingParams(temperature=0, max_tokens=12, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


def make_exact_core(folder: Path, **settings: object) -> EngineCore:
    """With the C++ kernels: the same bits whatever is in the step."""
    core = make_core(folder, attention_backend="auto", **settings)
    if core.ready.attention_backend != "cpu":
        pytest.skip("no C++ kernels")
    return core


def run(core: EngineCore, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[TokenOutput]:
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        add(core, str(index), prompt, own)
    outputs = finish(core)
    assert not core._runner._readers._readers
    return [outputs[str(index)] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[TokenOutput]:
    """Each prompt whole and by itself, then the long one."""
    core = make_exact_core(folder, enable_prefix_caching=False)
    return [run(core, [prompt], ASK_AND_GO_ON)[0] for prompt in [*PROMPTS, LONG]]


def without_ids(outputs: list[TokenOutput]) -> list[TokenOutput]:
    return [msgspec.structs.replace(output, request_id="") for output in outputs]


def assert_equal_to_transformers(model: Any, prompt: list[int], entries: list[TokenLogprobs] | None) -> None:
    assert entries is not None
    assert [entry.token_id for entry in entries] == prompt[1:]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    top = expected.topk(3)
    for entry, row, ids, values in zip(entries, expected, top.indices, top.values, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert [token_id for token_id, _ in entry.top] == ids.tolist()
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize("machine", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 32}),
        ("qwen3", {"head_dim": 32, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    ],
    ids=str,
)
def test_prompt_logprobs_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, family: str, config: dict[str, Any]
) -> None:
    model = write_tiny(tmp_path, family, **config)
    if machine == "torch":
        monkeypatch.setattr("engine.loading.select_ops", lambda config, *_, **__: (torch_ops(config), []))
        core = make_core(tmp_path, max_num_batched_tokens=70)
    else:
        core = make_exact_core(tmp_path, max_num_batched_tokens=70)
    prompts = [*PROMPTS[:4], LONG]
    params = [ASK, ASK_AND_GO_ON, GO_ON, ASK, ASK_AND_GO_ON]
    for prompt, own, output in zip(prompts, params, run(core, prompts, params), strict=True):
        assert (output.finish_reason, len(output.new_token_ids)) == ("length", own.max_tokens)
        if own is GO_ON:
            assert output.prompt_logprobs is None
        else:
            assert_equal_to_transformers(model, prompt, output.prompt_logprobs)


@pytest.mark.parametrize("chunk", [1, 16, 17, 64, 128])
def test_chunks_and_mates_change_nothing(folder: Path, alone: list[TokenOutput], chunk: int) -> None:
    core = make_exact_core(folder, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    outputs = run(core, [*PROMPTS, LONG], ASK_AND_GO_ON)
    assert without_ids(outputs) == without_ids(alone)


def test_it_does_not_matter_who_else_asks_and_who_goes_on(folder: Path, alone: list[TokenOutput]) -> None:
    params = [(ASK, ASK_AND_GO_ON, GO_ON)[index % 3] for index in range(9)]
    outputs = run(make_exact_core(folder, max_num_batched_tokens=100), [*PROMPTS, LONG], params)
    for own, output, expected in zip(params, outputs, alone, strict=True):
        assert output.prompt_logprobs == (None if own is GO_ON else expected.prompt_logprobs)
        goes_on = own is not ASK
        assert output.new_token_ids == (expected.new_token_ids if goes_on else [])
        assert output.logprobs == (expected.logprobs if goes_on else [])


def test_the_cache_is_filled_but_not_read(folder: Path, alone: list[TokenOutput]) -> None:
    core = make_exact_core(folder)
    for _ in range(3):
        [output] = run(core, [LONG], ASK_AND_GO_ON)
        assert without_ids([output]) == without_ids(alone[-1:])
        assert output.num_cached_tokens == 0
    [other] = run(core, [LONG], GO_ON)
    assert other.num_cached_tokens == 144
    assert (other.new_token_ids, other.logprobs) == (alone[-1].new_token_ids, alone[-1].logprobs)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_preemption_at_any_step_loses_and_repeats_nothing(
    folder: Path, alone: list[TokenOutput], enable_prefix_caching: bool
) -> None:
    """150 tokens in chunks of 40, then 12 of output: preempted once after each of the steps, or twice."""
    core = make_exact_core(folder, max_num_batched_tokens=40, enable_prefix_caching=enable_prefix_caching)
    for num_steps in range(1, 16):
        for times in (1, 2):
            add(core, "0", LONG, ASK_AND_GO_ON)
            outputs = []
            for _ in range(times):
                for _ in range(num_steps):
                    outputs += core.step() if core.has_work else []
                if core.scheduler.running:
                    core.scheduler._preempt(core.scheduler.running.pop())
            assert without_ids([finish(core, outputs)["0"]]) == without_ids(alone[-1:])


def test_a_tight_cache_changes_nothing(folder: Path) -> None:
    core = make_exact_core(folder, kv_cache_tokens=256, max_num_batched_tokens=4, max_num_seqs=3)
    preempted = []
    preempt = core.scheduler._preempt
    core.scheduler._preempt = lambda request: (preempted.append(request.num_output_tokens), preempt(request))  # type: ignore[method-assign,assignment]
    params = SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=3, logprobs=2)
    prompts = [PROMPTS[5], PROMPTS[1], LONG, *PROMPTS, LONG[::-1]]
    roomy = make_exact_core(folder, enable_prefix_caching=False)
    assert without_ids(run(core, prompts, params)) == without_ids(run(roomy, prompts, params))
    assert 0 in preempted, "one was preempted inside its prompt"
    assert any(preempted), "and one behind it"


def test_prompt_logprobs_are_those_that_the_output_had(folder: Path, alone: list[TokenOutput]) -> None:
    whole = LONG + alone[-1].new_token_ids
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    [output] = run(make_exact_core(folder), [whole], params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[len(LONG) - 1 :] == alone[-1].logprobs


@pytest.mark.parametrize("count", [0, 1, 20])
def test_as_many_of_the_likeliest_as_were_asked_for(folder: Path, count: int) -> None:
    [output] = run(make_core(folder), [LONG], SamplingParams(max_tokens=1, prompt_logprobs=count))
    assert output.prompt_logprobs is not None
    assert {len(entry.top) for entry in output.prompt_logprobs} == {count}


def test_a_single_token_has_none(folder: Path) -> None:
    for params in (ASK, ASK_AND_GO_ON):
        [output] = run(make_core(folder), [[7]], params)
        assert output.prompt_logprobs == []
        assert len(output.new_token_ids) == params.max_tokens


def test_logits_exist_for_few_rows_at_once_and_for_nobody_who_did_not_ask(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(folder)
    model, sizes = core._runner._model, []
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: (sizes.append(len(hidden)), compute(hidden))[1])
    run(core, [LONG, LONG], [ASK, GO_ON])
    assert max(sizes) <= 64
    assert sum(sizes) == 149 + 12
    sizes.clear()
    run(core, [LONG, LONG], GO_ON)
    assert sum(sizes) == 24


@pytest.mark.parametrize(
    "params",
    [ASK, ASK_AND_GO_ON, SamplingParams(max_tokens=0, pooling="mean"), SamplingParams(max_tokens=0, pooling="last")],
    ids=["prompt", "prompt and output", "mean", "last"],
)
@pytest.mark.parametrize("position", [0, 20, 48])
def test_a_prompt_that_gives_no_numbers_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, params: SamplingParams, position: int
) -> None:
    """Token 9 poisons the positions from its own on."""
    model = write_tiny(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    model.save_pretrained(tmp_path)
    good = [5 if token == 9 else token for token in LONG]
    bad = good[:50]
    bad[position] = 9
    core = make_core(tmp_path, max_num_batched_tokens=70)
    outputs = run(core, [good, bad, good], [ASK, params, ASK])
    assert (outputs[1].finish_reason, outputs[1].new_token_ids) == ("error", [])
    assert (outputs[1].prompt_logprobs, outputs[1].embedding) == (None, None)
    assert "not a number" in caplog.text
    assert outputs[0].prompt_logprobs == outputs[2].prompt_logprobs
    for output in outputs:
        entries = [*(output.logprobs or []), *(output.prompt_logprobs or [])]
        assert np.isfinite([entry.logprob for entry in entries]).all()


def test_without_output_a_prompt_may_fill_the_context(folder: Path) -> None:
    core = make_core(folder, kv_cache_tokens=1024, max_num_batched_tokens=200)
    inputs = InputProcessor(EngineConfig(model=str(folder)))
    prompt = random_prompts(1, lengths=(1024, 1024))[0]
    mate = PROMPTS[0]
    inputs.validate(prompt, ASK, core.ready)
    full, other = run(core, [prompt, mate], [ASK, GO_ON])
    assert full.prompt_logprobs is not None
    assert (full.finish_reason, full.new_token_ids, len(full.prompt_logprobs)) == ("length", [], 1023)
    assert len(other.new_token_ids) == 12
    for params, length in ((ASK, 1025), (GO_ON, 1024)):
        assert_refused(core, inputs, [*prompt, 5][:length], params)


def test_without_output_a_prompt_may_fill_the_cache(folder: Path) -> None:
    core = make_core(folder, kv_cache_tokens=64)
    inputs = InputProcessor(EngineConfig(model=str(folder)))
    for params, longest in ((ASK, 64), (SamplingParams(max_tokens=1), 64)):
        inputs.validate([5] * longest, params, core.ready)
        [output] = run(core, [[5] * longest], params)
        assert (output.finish_reason, len(output.new_token_ids)) == ("length", params.max_tokens)
        assert_refused(core, inputs, [5] * (longest + 1), params)


def assert_refused(core: EngineCore, inputs: InputProcessor, prompt: list[int], params: SamplingParams) -> None:
    """By the core and before it, both naming the length."""
    with pytest.raises(ContextLengthExceeded, match=str(len(prompt))):
        inputs.validate(prompt, params, core.ready)
    refusal = core.add_request(AddRequest(request_id="big", prompt_token_ids=prompt, sampling_params=params))
    assert refusal is not None
    assert (refusal.error_type, str(len(prompt)) in (refusal.error or "")) == ("ContextLengthExceeded", True)


def test_nothing_asked_and_nothing_generated_is_an_end_all_the_same(folder: Path) -> None:
    params = SamplingParams(max_tokens=0, stop_token_ids=(LONG[-1],), stop=("a",))
    core = make_core(folder, max_num_batched_tokens=64)
    [output] = run(core, [LONG], params)
    assert (output.finish_reason, output.stop_reason, output.new_token_ids) == ("length", None, [])
    assert output.prompt_logprobs is None
    assert run(core, [LONG], GO_ON)[0].num_cached_tokens == 144


def test_scripts_get_the_whole_list(folder: Path) -> None:
    settings = {"dtype": "float32", "attention_backend": "torch_reference", "kv_cache_tokens": 4096, "num_threads": 1}
    llm = LLM(str(folder), max_num_batched_tokens=64, **settings)
    both, none = llm.generate([LONG, LONG], [msgspec.structs.replace(ASK_AND_GO_ON, n=2, seed=1), GO_ON])
    for output in both.outputs:
        assert output.prompt_logprobs is not None
        assert [entry.token_id for entry in output.prompt_logprobs] == LONG[1:]
    assert none.outputs[0].prompt_logprobs is None
    [[silent]] = [result.outputs for result in llm.generate(LONG, ASK)]
    assert (silent.text, silent.token_ids, silent.finish_reason) == ("", [], "length")
    assert silent.prompt_logprobs == both.outputs[0].prompt_logprobs
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=21)
