"""Cores that end, freeze, hang and do not start, and what becomes of requests and of the engine."""

import asyncio
import os
import signal
import time

import psutil
import pytest
import pytest_asyncio

from configs.errors import EngineDead, QueueFull, Unavailable, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig, ServerConfig
from engine.async_engine import AsyncEngine
from engine.supervisor import FROZEN_AFTER, Supervision
from tests.engine.odd_core import ANSWER, DIE, HOLD, SLEEP
from tests.engine.tiny_models import write_tiny

PARAMS = SamplingParams(max_tokens=5, temperature=0)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return EngineConfig(model=str(folder))


@pytest.fixture
def mark(tmp_path):
    """A file; while it exists, no core becomes ready, or only after so many seconds as it says."""
    return tmp_path / "mark"


@pytest_asyncio.fixture(loop_scope="module")
async def start(config, mark):
    engines = []

    async def start(**supervision):
        core = ("tests.engine.odd_core", str(mark))
        engine = await AsyncEngine.start(config, core, supervision=Supervision(**supervision))
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.shutdown()


async def ask(engine, *prompt, request_id=None, **options):
    """The finish reason."""
    outputs = engine.generate(list(prompt), PARAMS, request_id=request_id or os.urandom(4).hex(), **options)
    return [output.finish_reason async for output in outputs][-1]


def pid_of(engine):
    return engine._supervisor.client.pid


def odd_cores():
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "odd_core" in " ".join(child.cmdline())]


async def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        await asyncio.sleep(0.02)


async def test_another_core_takes_the_place_of_one_that_was_killed(start):
    engine = await start(max_restarts=1, patience=10)
    first = pid_of(engine)
    running = [asyncio.create_task(ask(engine, SLEEP, 50)) for _ in range(8)]
    await asyncio.sleep(0.2)
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert time.monotonic() - killed < 2
    assert all(isinstance(result, EngineDead) and "signal 9" in result.message for result in results)
    assert all(result.retry_after >= 1 for result in results)
    assert engine.health().status == "restarting"
    assert await ask(engine, ANSWER) == "length", "a new request waits for the new core"
    assert pid_of(engine) != first
    assert engine.health().status == "ok"
    assert not engine.is_dead
    assert engine._mailboxes == {}
    assert engine._waiting_room.places == {}


async def test_what_is_sent_to_a_core_that_has_just_ended_holds_up_nobody(start):
    engine = await start(max_restarts=1, patience=10)
    os.kill(pid_of(engine), signal.SIGKILL)
    for _ in range(5):  # meanwhile the socket notices, and the event loop does not
        time.sleep(0.05)
        engine._supervisor.client._receive()
    with pytest.raises(EngineDead):
        await ask(engine, ANSWER)
    assert await ask(engine, ANSWER) == "length"


async def test_a_request_id_may_be_used_again_at_once(start):
    """The reader of the lost one may not even have noticed; it must not end the new one."""
    engine = await start(max_restarts=1, patience=10)
    lost = engine.generate([SLEEP, 100], PARAMS, request_id="same")
    reading = asyncio.create_task(anext(lost))
    await asyncio.sleep(0.1)
    os.kill(pid_of(engine), signal.SIGKILL)
    await until(lambda: engine._mailboxes == {})
    again = asyncio.create_task(ask(engine, ANSWER, request_id="same"))
    with pytest.raises(EngineDead):
        await reading
    assert await again == "length"


async def test_no_more_wait_for_another_core_than_may_wait_for_a_token(config, mark):
    core = ("tests.engine.odd_core", str(mark))
    supervision = Supervision(max_restarts=1, patience=60)
    engine = await AsyncEngine.start(config, core, supervision=supervision, max_queued_requests=20)
    try:
        mark.write_text("1.5")
        os.kill(pid_of(engine), signal.SIGKILL)
        while engine.health().status == "ok":
            await asyncio.sleep(0.01)
        before = time.process_time()
        early = [asyncio.create_task(ask(engine, ANSWER)) for _ in range(20)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            engine.check_room(1, 1)
        let_in = engine.generate_many([([ANSWER], PARAMS)], request_id="let in before", has_room=True)
        late = asyncio.create_task(anext(let_in))
        others = await asyncio.gather(*(ask(engine, ANSWER) for _ in range(1980)), return_exceptions=True)
        answers = others + await asyncio.gather(*early, return_exceptions=True)
        assert await late
        await let_in.aclose()
        assert time.process_time() - before < 1.5, "waiting costs CPU time"
        assert answers.count("length") == 20
        refused = [answer for answer in answers if isinstance(answer, QueueFull)]
        assert len(refused) == 1980
        assert all(error.retry_after >= 1 for error in refused)
    finally:
        await engine.shutdown()


async def test_a_fault_while_a_core_is_replaced_counts_as_a_failed_start(start, monkeypatch):
    engine = await start(max_restarts=2, patience=10)

    async def fail(*args):
        raise MemoryError("no memory")

    monkeypatch.setattr("engine.core_client.CoreClient.start", fail)
    os.kill(pid_of(engine), signal.SIGKILL)
    assert "no memory" in await asyncio.wait_for(engine.wait_death(), 20)
    with pytest.raises(EngineDead):
        await ask(engine, ANSWER)


async def test_an_engine_that_nobody_looks_after_is_dead(start, monkeypatch):
    engine = await start(max_restarts=2, patience=10)

    def fail():
        raise MemoryError("while looking")

    monkeypatch.setattr(engine._supervisor, "health", fail)
    assert "MemoryError" in await asyncio.wait_for(engine.wait_death(), 20)


async def test_without_patience_requests_are_told_when_to_come_back(start, mark):
    engine = await start(max_restarts=1, patience=0.1)
    mark.write_text("1")
    os.kill(pid_of(engine), signal.SIGKILL)
    await until(lambda: engine.health().status == "restarting")
    with pytest.raises(Unavailable, match="is being started") as caught:
        await ask(engine, ANSWER)
    assert caught.value.code == "engine_restarting"
    assert 1 <= caught.value.retry_after <= 10
    await until(lambda: engine.health().status == "ok")
    assert await ask(engine, ANSWER) == "length"


async def test_cores_that_end_before_they_have_answered_are_not_replaced_for_ever(start, caplog):
    engine = await start(max_restarts=2, patience=10)
    for _ in range(3):
        with pytest.raises(EngineDead, match="exit status 3"):
            await ask(engine, DIE)
    assert await asyncio.wait_for(engine.wait_death(), 5) == (
        "the engine ended 3 times in a row before it answered a request; the last: "
        "the engine has stopped (exit status 3); see the server's log"
    )
    assert engine.is_dead
    assert engine.health().status == "dead"
    with pytest.raises(EngineDead, match="3 times"):
        await ask(engine, ANSWER)


async def test_an_answer_in_between_makes_it_another_row(start):
    engine = await start(max_restarts=1, patience=10)
    for _ in range(4):
        assert await ask(engine, ANSWER) == "length"
        with pytest.raises(EngineDead):
            await ask(engine, DIE)
    assert await ask(engine, ANSWER) == "length"


async def test_a_core_that_does_not_start_counts_as_one_that_ended(start, mark):
    engine = await start(max_restarts=1, patience=0)
    mark.touch()
    os.kill(pid_of(engine), signal.SIGKILL)
    assert await asyncio.wait_for(engine.wait_death(), 10) == (
        "the engine ended 2 times in a row before it answered a request; the last: the mark is there"
    )


async def test_a_core_that_is_killed_while_it_starts(config, mark):
    """As the kernel does when memory is short."""
    mark.write_text("20")
    starting = asyncio.create_task(AsyncEngine.start(config, ("tests.engine.odd_core", str(mark))))
    await until(lambda: odd_cores())
    [core] = odd_cores()
    core.kill()
    with pytest.raises(UsageError, match="out of memory"):
        await starting


async def test_without_supervision_the_engine_dies_with_its_core(start):
    engine = await start()
    os.kill(pid_of(engine), signal.SIGKILL)
    assert "signal 9" in await asyncio.wait_for(engine.wait_death(), 5)
    assert engine.is_dead


async def test_a_frozen_core_is_noticed_and_so_is_its_end(start):
    engine = await start(max_restarts=1, patience=0, unresponsive_timeout=0)
    assert await ask(engine, ANSWER) == "length"
    os.kill(pid_of(engine), signal.SIGSTOP)
    stopped = time.monotonic()
    await until(lambda: engine.health().status == "frozen")
    assert FROZEN_AFTER - 0.5 < time.monotonic() - stopped < FROZEN_AFTER + 1
    assert "no sign of life" in engine.health().reason
    with pytest.raises(Unavailable) as caught:
        await ask(engine, ANSWER)
    assert caught.value.code == "engine_frozen"
    os.kill(pid_of(engine), signal.SIGCONT)
    await until(lambda: engine.health().status == "ok", 1)
    assert await ask(engine, ANSWER) == "length"


async def test_a_core_that_stays_frozen_is_replaced(start):
    engine = await start(max_restarts=1, patience=10, unresponsive_timeout=0.5)
    assert await ask(engine, ANSWER) == "length"
    frozen = pid_of(engine)
    reader = asyncio.create_task(ask(engine, SLEEP, 1))
    os.kill(frozen, signal.SIGSTOP)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(reader, 8)
    assert await ask(engine, ANSWER) == "length"
    assert not psutil.pid_exists(frozen)


async def test_a_step_that_takes_too_long_is_stuck_and_one_that_ends_was_not(start):
    engine = await start(max_restarts=1, step_timeout=0.4)
    reader = asyncio.create_task(ask(engine, SLEEP, 10))
    await asyncio.sleep(0.2)
    health = engine.health()
    assert health.status == "ok"
    assert 0 < health.step_age < 0.4
    await until(lambda: engine.health().status == "stuck", 1)
    assert "step takes" in engine.health().reason
    assert await reader == "length"
    await until(lambda: engine.health().status == "ok", 1)


async def test_a_core_that_is_busy_is_not_called_dead(start):
    """Its heart cannot beat: compiled code has the interpreter's lock. But it uses the processor."""
    engine = await start(max_restarts=1)
    reader = asyncio.create_task(ask(engine, HOLD))
    begun, statuses, oldest = time.monotonic(), set(), 0.0
    while not reader.done():
        health = engine.health()
        statuses.add(health.status)
        oldest = max(oldest, health.step_age)
        await asyncio.sleep(0.05)
    assert await reader == "length"
    assert time.monotonic() - begun > FROZEN_AFTER, "held too briefly to mean anything"
    assert oldest > FROZEN_AFTER
    assert statuses == {"ok"}


async def test_a_deadline_holds_though_the_core_is_at_something_else(start):
    engine = await start(max_restarts=1)
    begun = time.monotonic()
    assert await ask(engine, SLEEP, 30, deadline=begun + 0.3) == "timeout"
    assert time.monotonic() - begun < 1.5
    assert engine._mailboxes == {}


async def test_a_request_does_not_wait_for_a_core_beyond_its_deadline(start, mark):
    engine = await start(max_restarts=9, patience=60)
    mark.touch()
    os.kill(pid_of(engine), signal.SIGKILL)
    await until(lambda: engine.health().status == "restarting")
    begun = time.monotonic()
    with pytest.raises(Unavailable):
        await ask(engine, ANSWER, deadline=begun + 0.2)
    assert time.monotonic() - begun < 1


async def test_shutting_down_during_a_restart_leaves_nothing_behind(start, mark):
    engine = await start(max_restarts=9)
    os.kill(pid_of(engine), signal.SIGKILL)
    await until(lambda: engine.health().status == "restarting")
    await engine.shutdown()
    assert not odd_cores()


async def test_secrets_of_the_server_are_not_on_the_cores_command_line(config, mark):
    settings = ServerConfig(model=config.model, served_model_name=("a-secret",))
    engine = await AsyncEngine.start(settings, ("tests.engine.odd_core", str(mark)))
    try:
        line = " ".join(psutil.Process(pid_of(engine)).cmdline())
        assert config.model in line
        assert "a-secret" not in line
    finally:
        await engine.shutdown()
