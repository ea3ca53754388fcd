"""Embeddings of prompts: transformers' final hidden states, pooled, in every way of computing them; and both faces."""

import asyncio
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch

from configs.errors import InvalidRequest, RequestFailed
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from engine.core import EngineCore
from engine.llm import LLM
from tests.engine.core_runs import add, finish, make_core, random_prompts
from tests.engine.paged_runs import torch_ops
from tests.engine.tiny_models import write_tiny

Pooling = Literal["last", "mean"]
POOLINGS: list[Pooling] = ["last", "mean"]
PROMPTS = [*random_prompts(7), *random_prompts(1, lengths=(150, 150), seed=3), [7]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "torch_reference",
    "kv_cache_tokens": 4096,
    "num_threads": 1,
    "max_num_batched_tokens": 64,
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **SETTINGS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> Any:
    engine = await AsyncEngine.start(EngineConfig(model=str(folder), **SETTINGS))
    yield engine
    await engine.shutdown()


def make_exact_core(folder: Path, **settings: object) -> EngineCore:
    core = make_core(folder, attention_backend="auto", **settings)
    if core.ready.attention_backend != "cpu":
        pytest.skip("no C++ kernels")
    return core


def embeddings(core: EngineCore, prompts: list[list[int]], pooling: Pooling) -> list[list[float]]:
    for index, prompt in enumerate(prompts):
        add(core, str(index), prompt, SamplingParams(max_tokens=0, pooling=pooling))
    outputs = finish(core)
    found = []
    for index in range(len(prompts)):
        output = outputs[str(index)]
        assert (output.finish_reason, output.new_token_ids, output.prompt_logprobs) == ("length", [], None)
        assert output.embedding is not None
        found.append(output.embedding)
    return found


def expected_embedding(model: Any, prompt: list[int], pooling: Pooling) -> list[float]:
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return (states[-1] if pooling == "last" else states.mean(0)).tolist()


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[list[float]]]:
    """Each prompt whole and by itself."""
    core = make_exact_core(folder, enable_prefix_caching=False)
    return {pooling: [embeddings(core, [prompt], pooling)[0] for prompt in PROMPTS] for pooling in POOLINGS}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("machine", ["torch", "cpu"])
@pytest.mark.parametrize(("family", "config"), [("llama", {}), ("mistral", {"sliding_window": 32}), ("qwen2", {})])
async def test_embeddings_equal_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    pooling: Pooling,
    family: str,
    config: dict[str, Any],
) -> None:
    model = write_tiny(tmp_path, family, **config)
    if machine == "torch":
        monkeypatch.setattr("engine.loading.select_ops", lambda config, *_, **__: (torch_ops(config), []))
        core = make_core(tmp_path, max_num_batched_tokens=70)
    else:
        core = make_exact_core(tmp_path, max_num_batched_tokens=70)
    found = embeddings(core, PROMPTS, pooling)
    np.testing.assert_allclose(found, [expected_embedding(model, prompt, pooling) for prompt in PROMPTS], atol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("chunk", [1, 17, 64, 128])
async def test_chunks_and_mates_change_nothing(
    folder: Path, alone: dict[str, list[list[float]]], pooling: Pooling, chunk: int
) -> None:
    core = make_exact_core(folder, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8))
    assert embeddings(core, PROMPTS, pooling) == alone[pooling]


@pytest.mark.parametrize(("pooling", "num_cached"), [("last", 144), ("mean", 0)])
async def test_a_warm_cache_changes_nothing(
    folder: Path, alone: dict[str, list[list[float]]], pooling: Pooling, num_cached: int
) -> None:
    core = make_exact_core(folder)
    add(core, "plain", PROMPTS[7], GREEDY)
    finish(core)
    add(core, "warm", PROMPTS[7], SamplingParams(max_tokens=0, pooling=pooling))
    output = finish(core)["warm"]
    assert (output.embedding, output.num_cached_tokens) == (alone[pooling][7], num_cached)


@pytest.mark.parametrize("pooling", POOLINGS)
async def test_a_preemption_at_any_step_changes_nothing(
    folder: Path, alone: dict[str, list[list[float]]], pooling: Pooling
) -> None:
    core = make_exact_core(folder, max_num_batched_tokens=40)
    for num_steps in (1, 2, 3):
        add(core, "0", PROMPTS[7], SamplingParams(max_tokens=0, pooling=pooling), cache_salt=str(num_steps))
        outputs = [output for _ in range(num_steps) for output in core.step()]
        assert outputs == []
        core.scheduler._preempt(core.scheduler.running.pop())
        assert finish(core)["0"].embedding == alone[pooling][7]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("chunk", [40, 512])
async def test_one_request_may_ask_for_both(
    folder: Path, alone: dict[str, list[list[float]]], pooling: Pooling, chunk: int
) -> None:
    core = make_exact_core(folder, max_num_batched_tokens=chunk)
    add(core, "both", PROMPTS[7], SamplingParams(max_tokens=0, pooling=pooling, prompt_logprobs=1))
    add(core, "logprobs", PROMPTS[7], SamplingParams(max_tokens=0, prompt_logprobs=1))
    outputs = finish(core)
    assert outputs["both"].embedding == alone[pooling][7]
    assert outputs["both"].prompt_logprobs == outputs["logprobs"].prompt_logprobs
    assert outputs["logprobs"].embedding is None


async def test_generating_mates_are_undisturbed(folder: Path, alone: dict[str, list[list[float]]]) -> None:
    core = make_exact_core(folder, max_num_batched_tokens=90)
    quiet = make_exact_core(folder)
    for index, prompt in enumerate(PROMPTS):
        add(core, f"mean {index}", prompt, SamplingParams(max_tokens=0, pooling="mean"))
        add(core, f"last {index}", prompt, SamplingParams(max_tokens=0, pooling="last"))
        add(core, f"text {index}", prompt, GREEDY)
        add(quiet, f"text {index}", prompt, GREEDY)
    outputs, expected = finish(core), finish(quiet)
    for index in range(len(PROMPTS)):
        assert outputs[f"text {index}"].new_token_ids == expected[f"text {index}"].new_token_ids
        for pooling in POOLINGS:
            assert outputs[f"{pooling} {index}"].embedding == alone[pooling][index]


@pytest.mark.parametrize("pooling", POOLINGS)
async def test_bfloat16_is_near_float32(folder: Path, pooling: Pooling) -> None:
    exact, rounded = (
        np.array(embeddings(make_core(folder, attention_backend="auto", dtype=dtype), PROMPTS, pooling))
        for dtype in ("float32", "bfloat16")
    )
    cosine = (exact * rounded).sum(1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(rounded, axis=1)
    assert cosine.min() > 0.999


async def test_embeddings_do_not_generate(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens 0"):
        SamplingParams(pooling="mean")
    core = make_core(folder)
    model, rows = core._runner._model, []
    compute = model.compute_logits
    model.compute_logits = lambda hidden: (rows.append(len(hidden)), compute(hidden))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    embeddings(core, PROMPTS, "mean")
    assert sum(rows) == 0


async def test_scripts_embed_texts_and_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    one, other, third = llm.embed(["Hello", ids, "Other"])
    assert one == other != third
    assert llm.embed("Hello") == llm.embed(ids) == [one]
    assert llm.embed([]) == []
    assert llm.embed("Hello", "mean") != [one]
    [[by_generate]] = [each.outputs for each in llm.generate(ids, SamplingParams(max_tokens=0, pooling="last"))]
    assert (by_generate.embedding, by_generate.text) == (one, "")
    with pytest.raises(InvalidRequest, match="empty"):
        llm.embed([ids, []])


async def test_scripts_hear_of_a_prompt_that_gives_no_numbers(tmp_path: Path) -> None:
    model = write_tiny(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS)
    for pooling in POOLINGS:
        with pytest.raises(RequestFailed, match="not a number"):
            llm.embed([[7, 8], [7, 9, 8]], pooling)
        assert len(llm.embed([7, 8], pooling)) == 1


async def test_the_engine_embeds_as_scripts_do(engine: AsyncEngine, llm: LLM) -> None:
    for pooling in POOLINGS:
        found = await engine.embed(PROMPTS, request_id="embed", pooling=pooling)
        np.testing.assert_allclose(found, llm.embed(PROMPTS, pooling), atol=1e-6)
    assert await engine.embed([], request_id="none", pooling="last") == []
    assert not engine._mailboxes


async def test_prompt_logprobs_reach_a_slow_reader_once(engine: AsyncEngine, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, prompt_logprobs=2)
    outputs = []
    async for output in engine.generate(PROMPTS[7], params, request_id="slow"):
        outputs.append(output)
        await asyncio.sleep(0.05)
    assert 1 < len(outputs) < 40
    [completion] = llm.generate(PROMPTS[7], params)[0].outputs
    assert outputs[0].prompt_logprobs is not None
    assert [output.prompt_logprobs for output in outputs[1:]] == [None] * (len(outputs) - 1)
    assert outputs[0].prompt_logprobs == completion.prompt_logprobs


async def test_cancelling_aborts_what_has_not_ended(engine: AsyncEngine) -> None:
    prompts = [prompt * 4 for prompt in random_prompts(60, lengths=(150, 200), seed=5)]
    task = asyncio.create_task(engine.embed(prompts, request_id="cancelled", pooling="mean"))
    await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engine._mailboxes
    again = await asyncio.wait_for(engine.embed(prompts[:1], request_id="cancelled", pooling="mean"), 2)
    assert len(again[0]) == 64


async def test_a_prompt_that_the_core_refuses_is_named(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="1025"):
        await engine.embed([[5], [5] * 1025], request_id="long", pooling="last")
    assert not engine._mailboxes
    params = SamplingParams(max_tokens=0, pooling="last")
    engine.validate([5] * 1024, params)
    with pytest.raises(InvalidRequest, match="1024"):
        engine.validate([5] * 1024, msgspec.structs.replace(params, max_tokens=1, pooling=None))
