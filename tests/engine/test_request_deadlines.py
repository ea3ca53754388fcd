"""Deadlines of requests to the engine in its own process."""

import asyncio
import time

import pytest
import pytest_asyncio

from configs.errors import DeadlinePassed
from configs.sampling import SamplingParams, StructuredOutput
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from tests.engine.tiny_models import write_tiny

PROMPT = [5, 6, 7]
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    settings = {"dtype": "float32", "attention_backend": "torch_reference", "num_threads": 1, "max_num_seqs": 2}
    engine = await AsyncEngine.start(EngineConfig(model=str(folder), kv_cache_tokens=4096, **settings))
    yield engine
    await engine.shutdown()


async def collect(engine, prompt, params, *, request_id="r", seconds=None):
    deadline = None if seconds is None else time.monotonic() + seconds
    outputs = engine.generate(prompt, params, request_id=request_id, deadline=deadline)
    return [output async for output in outputs]


def tokens_of(outputs):
    return [token_id for output in outputs for token_id in output.token_ids]


async def test_a_request_ends_with_a_part_of_its_answer(engine):
    whole = tokens_of(await collect(engine, PROMPT, ENDLESS))
    start = time.monotonic()
    part = await collect(engine, PROMPT, ENDLESS, seconds=0.2)
    assert 0.2 <= time.monotonic() - start < 0.6, "the core ends it, not the one who waits for it"
    assert part[-1].finish_reason == "timeout"
    ids = tokens_of(part)
    assert 0 < len(ids) < len(whole)
    assert ids == whole[: len(ids)]
    assert "".join(output.text for output in part) == engine.tokenizer.decode(ids)
    assert part[-1].num_output_tokens == len(ids)
    assert engine._mailboxes == {}


async def test_a_request_that_waits_is_dropped_and_others_are_not_touched(engine):
    alone = tokens_of(await collect(engine, PROMPT, ENDLESS))
    running = [asyncio.create_task(collect(engine, PROMPT, ENDLESS, request_id=str(number))) for number in range(2)]
    await asyncio.sleep(0.05)
    [late] = await collect(engine, [8] * 50, ENDLESS, request_id="late", seconds=0.1)
    assert (late.finish_reason, late.text, late.num_output_tokens, late.num_prompt_tokens) == ("timeout", "", 0, 50)
    for outputs in await asyncio.gather(*running):
        assert tokens_of(outputs) == alone


async def test_a_deadline_that_is_over_already_computes_nothing(engine):
    steps = engine.health().num_steps
    [late] = await collect(engine, PROMPT, ENDLESS, seconds=-1)
    assert late.finish_reason == "timeout"
    assert engine.health().num_steps <= steps + 2


async def test_what_has_no_use_for_a_part_fails(engine):
    for work in (
        engine.embed([PROMPT], request_id="e", pooling="last", deadline=time.monotonic() - 1),
        engine.beam_search(
            PROMPT,
            SamplingParams(n=2, max_tokens=900, temperature=0),
            length_penalty=1.0,
            request_id="b",
            deadline=time.monotonic() + 0.1,
        ),
    ):
        with pytest.raises(DeadlinePassed):
            await work
    assert engine._mailboxes == {}


async def test_a_language_that_is_compiled_meanwhile_does_not_help(engine):
    params = SamplingParams(temperature=0, max_tokens=50, structured=StructuredOutput("regex", "[a-z]{50}"))
    start = time.monotonic()
    outputs = await collect(engine, PROMPT, params, seconds=0.001)
    assert outputs[-1].finish_reason == "timeout"
    assert time.monotonic() - start < 1.5
    assert (await collect(engine, PROMPT, params))[-1].finish_reason in ("stop", "length")
