"""What the engine tells of its requests while they run, and of itself."""

import asyncio
import os
import signal
import time

import msgspec
import pytest
import pytest_asyncio

from configs.errors import EngineDead, InvalidRequest, Unavailable
from configs.sampling import SamplingParams, StructuredOutput
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from engine.observer import Observer
from engine.supervisor import Supervision
from tests.engine.core_runs import add, make_core, random_prompts
from tests.engine.tiny_models import VOCAB_SIZE, write_tiny

SETTINGS = {"dtype": "float32", "attention_backend": "torch_reference", "kv_cache_tokens": 4096, "num_threads": 1}
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder):
    engine = await AsyncEngine.start(EngineConfig(model=str(folder), **SETTINGS), supervision=Supervision(3, 30.0))
    yield engine
    await engine.shutdown()


class Heard(Observer):
    """Keeps all that it is told."""

    def __init__(self):
        self.begun, self.tokens, self.ends, self.timelines, self.stats = [], {}, {}, {}, []

    def began(self, request):
        name = request.request_id + " again" * (request.request_id in self.begun)
        self.begun.append(name)
        return name

    def stepped(self, outputs, stats):
        self.stats.append(stats)
        for output in outputs:
            self.tokens[output.request_id] = self.tokens.get(output.request_id, 0) + len(output.new_token_ids)
            if output.timeline is not None:
                self.timelines[output.request_id] = output.timeline

    def ended(self, request_id, reason, num_output_tokens, timeline):
        assert request_id not in self.ends
        assert timeline is None or timeline.ended is not None
        self.ends[request_id] = (reason, num_output_tokens)


@pytest.fixture
def heard(engine):
    engine.observer = heard = Heard()
    yield heard
    engine.observer = Observer()


async def ask(engine, prompt, params, name=None, **options):
    """Outputs of a prompt of ten tokens, the same for the same name."""
    [token_ids] = random_prompts(1, lengths=(10, 10), seed=len(prompt))
    return [output async for output in engine.generate(token_ids, params, request_id=name or prompt, **options)]


async def test_each_choice_begins_and_ends_once_however_it_ends(engine, heard):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = "".join(output.text for output in await ask(engine, "whole", params))
    letter = next(letter for letter in text[5:] if letter.isascii())
    [*_, stopped] = await ask(engine, "whole", msgspec.structs.replace(params, stop=(letter,)), "cut")
    assert stopped.finish_reason == "stop"
    endless = [(random_prompts(1, seed=number)[0], ENDLESS) for number in range(3)]
    async for _ in (generation := engine.generate_many(endless, request_id="left")):
        break
    await generation.aclose()
    await engine.embed([[5, 6, 7]], request_id="embedded", pooling="mean")
    broken = SamplingParams(max_tokens=5, structured=StructuredOutput("regex", "(" * 9))
    with pytest.raises(InvalidRequest):
        await ask(engine, "refused", broken)
    late = await ask(engine, "late", ENDLESS, deadline=time.monotonic() + 0.1)
    assert heard.begun == [*heard.ends]
    numbers = {name: number for name, (_, number) in heard.ends.items()}
    assert {name: reason for name, (reason, _) in heard.ends.items()} == {
        "whole-0": "length",
        "cut-0": "stop",
        **{f"left-{number}": "abort" for number in range(3)},
        "embedded-0": "length",
        "refused-0": "error",
        "late-0": "timeout",
    }
    assert (numbers["whole-0"], numbers["cut-0"]) == (40, stopped.num_output_tokens)
    assert (numbers["late-0"], numbers["embedded-0"], numbers["refused-0"]) == (late[-1].num_output_tokens, 0, 0)


async def test_an_id_that_is_used_again_behind_a_lost_core_ends_for_each_request(engine, heard):
    """The reader of the lost request has not come back yet: it must not end the new one."""
    lost = engine.generate([5, 6, 7], ENDLESS, request_id="same")
    first = await anext(lost)
    os.kill(engine.pid, signal.SIGKILL)
    while engine._mailboxes:
        await asyncio.sleep(0.01)
    again = asyncio.create_task(ask(engine, "again", SamplingParams(temperature=0, max_tokens=100), "same"))
    while len(heard.begun) < 2:
        await asyncio.sleep(0.01)
    await lost.aclose()
    assert heard.ends == {"same-0": ("abort", first.num_output_tokens)}
    assert (await again)[-1].finish_reason == "length"
    assert heard.ends["same-0 again"] == ("length", 100)


async def test_every_message_brings_the_newest_numbers(engine, heard):
    before = engine.stats().counters
    await ask(engine, "long", SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
    steps = [stats.counters.num_steps for stats in heard.stats]
    assert steps == sorted(steps)
    assert heard.tokens == {"long-0": 7}
    timeline = heard.timelines["long-0"]
    assert timeline.queued <= timeline.admitted <= timeline.first_token <= timeline.ended
    await asyncio.sleep(0.1)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.counters.num_steps - before.num_steps == 7
    assert stats.counters.num_step_tokens - before.num_step_tokens == 10 + 6


async def test_a_snapshot_shows_what_runs_and_what_it_holds(engine):
    generation = engine.generate(random_prompts(1, lengths=(40, 40), seed=1)[0], ENDLESS, request_id="shown")
    async for _ in generation:
        break
    snapshots = await asyncio.gather(*(engine.snapshot() for _ in range(3)))
    for snapshot in snapshots:
        [request] = snapshot.requests
        assert (request.request_id, request.is_running, request.num_prompt_tokens) == ("shown-0", True, 40)
        assert [snapshot.blocks[block] for block in request.block_ids] == [1] * len(request.block_ids)
        assert request.timeline.first_token is not None
    assert snapshots[0].requests[0].num_tokens <= snapshots[2].requests[0].num_tokens
    await generation.aclose()
    snapshot = await engine.snapshot()
    assert not snapshot.requests
    assert set(snapshot.blocks) <= {0, 255}


async def test_counters_never_fall_though_the_core_is_replaced(folder):
    config = EngineConfig(model=str(folder), **SETTINGS)
    engine = await AsyncEngine.start(config, supervision=Supervision(max_restarts=1, patience=30))
    try:
        await ask(engine, "first", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        running = asyncio.create_task(ask(engine, "second", ENDLESS))
        await asyncio.sleep(0.1)
        told = engine.stats()
        assert (told.num_running, engine.num_restarts) == (1, 0)
        pid = engine.pid
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(engine.snapshot())
        await asyncio.sleep(0.05)
        told = engine.stats()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await running
        with pytest.raises(Unavailable):
            await asked
        with pytest.raises(Unavailable):
            await engine.snapshot()
        between = engine.stats()
        assert (between.num_running, between.num_used_blocks, between.counters) == (0, 0, told.counters)
        await ask(engine, "third", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert engine.num_restarts == 1
        assert engine.pid != pid
        after = engine.stats().counters
        assert after.num_steps >= told.counters.num_steps + 3
        assert after.num_step_tokens >= told.counters.num_step_tokens + 12
    finally:
        await engine.shutdown()


def told_timelines(core):
    """Of each request: with which number of preemptions its timeline was told, and whether with the end."""
    told = {}
    while core.has_work:
        for output in core.step():
            if output.timeline is not None:
                numbers = told.setdefault(output.request_id, [])
                numbers.append((output.timeline.num_preemptions, output.finish_reason is not None))
                assert output.new_token_ids
    return told


async def test_a_timeline_is_told_at_the_first_token_behind_each_preemption_and_at_the_end(folder):
    core = make_core(folder, kv_cache_tokens=128, max_num_seqs=4)
    for number, prompt in enumerate(random_prompts(4, lengths=(20, 24), seed=2)):
        add(core, str(number), prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    told = told_timelines(core)
    assert core.scheduler.counters.num_preemptions >= 3
    for numbers in told.values():
        times = numbers[-1][0]
        assert numbers == [*((number, False) for number in range(times + 1)), (times, True)]
    assert sum(numbers[-1][0] for numbers in told.values()) == core.scheduler.counters.num_preemptions


async def test_what_a_step_reads_is_known(folder, tmp_path):
    ready = make_core(folder).ready
    assert ready.weight_bytes == 4 * (ready.num_parameters - VOCAB_SIZE * 64), "rows of the embedding alone"
    assert ready.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4, "layers, keys and values, heads, dimensions, bytes"
    write_tiny(tmp_path, tie_word_embeddings=True)
    ready = make_core(tmp_path).ready
    assert ready.weight_bytes == 4 * ready.num_parameters
