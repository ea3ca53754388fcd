"""Who may wait, and for how long the others are told to stay away."""

import asyncio

import pytest

from configs.errors import QueueFull
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine import admission
from engine.admission import WaitingRoom
from engine.async_engine import AsyncEngine
from tests.engine.odd_core import ANSWER, SLEEP
from tests.engine.tiny_models import write_tiny


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(admission, "time", clock)
    return clock


def filled(room, count, *, tokens=10, priority=0, prefix="r"):
    for number in range(count):
        room.check(1, tokens, priority)
        room.enter(f"{prefix}{number}", tokens, priority)
    return room


def refused(room, num_requests=1, num_tokens=1, priority=0):
    try:
        room.check(num_requests, num_tokens, priority)
    except QueueFull:
        return True
    return False


def test_requests_are_bounded():
    room = filled(WaitingRoom(max_requests=3), 2)
    assert not refused(room, 1)
    assert refused(room, 2)
    filled(room, 1, prefix="more")
    assert refused(room, 1)
    room.leave("r0")
    assert not refused(room, 1)


def test_tokens_are_bounded():
    room = filled(WaitingRoom(max_tokens=100), 9)
    assert not refused(room, 5, 10)
    assert refused(room, 1, 11)
    room.leave("r0")
    assert not refused(room, 1, 11)


def test_whoever_comes_first_may_be_of_any_size():
    room = WaitingRoom(max_requests=3, max_tokens=100)
    room.check(64, 10**6)
    room.enter("huge", 10**6)
    assert refused(room)
    room.leave("huge")
    assert room.num_tokens == 0
    assert not refused(room)


def test_without_bounds_all_may_wait():
    assert not refused(filled(WaitingRoom(), 1000), 10**6, 10**9)


def test_leaving_twice_changes_nothing():
    room = filled(WaitingRoom(max_requests=3), 2)
    room.leave("r0")
    room.leave("r0")
    assert (room.num_tokens, set(room.places)) == (10, {"r1"})


def test_urgent_requests_find_room_before_others_and_not_without_end():
    room = filled(WaitingRoom(max_requests=4, by_priority=True), 4, priority=5)
    assert refused(room, priority=5)
    assert refused(room, priority=6)
    filled(room, 4, priority=1, prefix="urgent")
    assert refused(room, priority=1)
    assert refused(room, priority=-9), "twice the bound is the end"
    plain = filled(WaitingRoom(max_requests=4), 4, priority=5)
    assert refused(plain, priority=1)


def test_the_time_to_stay_away_follows_the_measured_rate(clock):
    """Whatever the rate was before, a new one is known after a while."""
    room = filled(WaitingRoom(), 1000)
    for number in range(500):
        clock.now += 0.1
        room.leave(f"r{number}")
    assert room.seconds_to_wait() in (50, 51)  # 500 that wait, 10 in a second
    for number in range(500, 900):
        clock.now += 0.01
        room.leave(f"r{number}")
    assert room.seconds_to_wait() <= 2  # 100 that wait, 100 in a second


def test_nobody_is_sent_away_for_longer_than_a_minute(clock):
    room = filled(WaitingRoom(), 50)
    clock.now += 3600
    room.leave("r0")
    assert room.seconds_to_wait() == 60


def test_a_queue_that_does_not_move_makes_the_wait_longer(clock):
    room = filled(WaitingRoom(), 10)
    assert room.seconds_to_wait() == 1
    clock.now += 4
    assert room.seconds_to_wait() == 40


def test_idle_time_does_not_count(clock):
    room = WaitingRoom()
    for number in range(20):
        filled(room, 1, prefix=str(number))
        clock.now += 0.5
        room.leave(f"{number}0")
        clock.now += 1000
    filled(room, 4)
    assert room.seconds_to_wait() in (2, 3)


async def last_reason(batches):
    return [output.finish_reason async for batch in batches for _, output in batch][-1]


@pytest.mark.parametrize("what", ["max_queued_requests", "max_queued_tokens"])
async def test_the_engine_refuses_what_its_queue_does_not_hold(tmp_path, what):
    write_tiny(tmp_path)
    config = EngineConfig(model=str(tmp_path))
    engine = await AsyncEngine.start(config, ("tests.engine.odd_core", str(tmp_path / "none")), **{what: 4})

    async def ask(*prompt):
        params = SamplingParams(max_tokens=5)
        outputs = engine.generate(list(prompt), params, request_id=str(prompt) + what)
        return [output.finish_reason async for output in outputs][-1]

    try:
        size = 1 if what == "max_queued_requests" else 2
        first = asyncio.create_task(ask(SLEEP, 5))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(ask(ANSWER, number)) for number in range(4 // size - 1)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull) as caught:
            await ask(ANSWER, 9)
        assert 1 <= caught.value.retry_after <= 60
        late = engine.generate_many([([ANSWER, 9], SamplingParams(max_tokens=5))], request_id="late", has_room=True)
        others.append(asyncio.create_task(last_reason(late)))
        assert await asyncio.gather(first, *others) == ["length"] * (4 // size + 1)
        assert await ask(ANSWER, 9) == "length"
        assert engine._waiting_room.places == {}
        cancelled = asyncio.create_task(ask(SLEEP, 5))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert engine._waiting_room.places == {}
    finally:
        await engine.shutdown()
