"""GET /v1/engine/live: what is told, to whom, and for how long the engine is asked."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import Unavailable
from configs.settings import ServerConfig
from engine.messages import RequestSnapshot, Snapshot, StepStats
from scheduler.timeline import Counters, Timeline
from server.metrics.live import INTERVAL, Live, LiveView, block_runs, live_engine
from server.serving import Serving
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine
from tests.server.test_reliability import serving_of

PATH = "/v1/engine/live"
EVENTS = {"accept": "text/event-stream"}


def look(*requests: RequestSnapshot, blocks: bytes = bytes(8), **stats: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "time": 0.0, "num_running": 0, "num_waiting": 0, "num_used_blocks": 0, "step_seconds": 0.0, "step_tokens": 0,
        "wait_cause": None, "counters": Counters(),
    }  # fmt: skip
    return Snapshot(StepStats(**{**fields, **stats}), list(requests), blocks)


@given(st.binary(max_size=400).map(lambda data: bytes(one % 3 for one in data)))
def test_runs_of_blocks_say_the_same_as_the_blocks(states: bytes) -> None:
    runs = live_engine(look(blocks=states), 16, now=0.0)["blocks"]
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    assert b"".join(bytes([value]) * length for length, value in pairs) == states
    assert all(one[1] != other[1] for one, other in itertools.pairwise(pairs))


@given(st.lists(st.integers(0, 12) | st.just(0), max_size=60))
def test_runs_of_a_request_say_the_same_as_its_table(block_ids: list[int]) -> None:
    runs = block_runs(block_ids)
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    assert [first and first + step for first, length in pairs for step in range(length)] == block_ids


def test_tables_of_neighbours_are_short() -> None:
    assert block_runs([0, 0, 0, 7, 8, 9, 4, 5]) == [0, 3, 7, 3, 4, 2]


def test_a_frame_tells_what_the_snapshot_holds() -> None:
    timeline = Timeline(queued=100.0, first_token=100.25, num_preemptions=1, num_recomputed_tokens=40)
    running = RequestSnapshot("a-0", True, 20, 50, 49, [3, 4, 5, 1], timeline)
    waiting = RequestSnapshot("b-0", False, 7, 7, 0, [], Timeline(queued=101.0))
    counters = Counters(num_steps=9, num_step_tokens=77, num_preemptions=1, num_prefix_queries=27, num_prefix_hits=16)
    stats = {"num_running": 1, "num_waiting": 1, "num_used_blocks": 4, "wait_cause": "blocks", "counters": counters}
    frame = live_engine(look(running, waiting, blocks=bytes([0, 1, 255, 2, 2, 1]), **stats), 16, now=101.5)
    assert (frame["running"], frame["waiting"], frame["wait_cause"], frame["used_blocks"]) == (1, 1, "blocks", 4)
    assert (frame["num_blocks"], frame["block_size"]) == (6, 16)
    assert frame["blocks"] == [1, 0, 1, 1, 1, 255, 2, 2, 1, 1]
    assert (frame["steps"], frame["computed_tokens"], frame["preemptions"]) == (9, 77, 1)
    assert (frame["prefix_queries"], frame["prefix_hits"]) == (27, 16)
    first, second = frame["requests"]
    assert (first["id"], first["is_running"], first["age"], first["ttft"]) == ("a-0", True, 1.5, 0.25)
    assert (first["prompt_tokens"], first["tokens"], first["computed_tokens"]) == (20, 50, 49)
    assert (first["preemptions"], first["recomputed_tokens"], first["blocks"]) == (1, 40, [3, 3, 1, 1])
    assert (second["id"], second["is_running"], second["ttft"], second["blocks"]) == ("b-0", False, None, [])


async def test_one_frame_for_whoever_asks(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.get(PATH)
    assert response.status_code == 200
    live = msgspec.json.decode(response.content, type=Live)
    assert live["status"] == "ok"
    assert live["engine"] is not None
    assert live["engine"]["num_blocks"] == 8
    assert engine.num_looks == 1
    assert (await client.head(PATH, headers=EVENTS)).status_code == 200


async def test_while_the_engine_is_away_its_state_is_told(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.status = "restarting"
    frame = (await client.get(PATH)).json()
    assert (frame["status"], frame["reason"], frame["engine"]) == ("restarting", "it is restarting", None)
    assert engine.num_looks == 0


async def test_an_end_in_the_middle_of_a_look_is_told(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    def ended() -> Snapshot:
        raise Unavailable("the engine is being started")

    engine.look = ended
    frame = (await client.get(PATH)).json()
    assert (frame["reason"], frame["engine"]) == ("the engine is being started", None)


async def test_a_dead_engine_is_not_watched(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_dead = True
    assert (await client.get(PATH)).status_code == 503


@pytest.fixture
def view(engine: FakeEngine) -> LiveView:
    return LiveView(Serving(engine, ServerConfig(), MODEL))  # type: ignore[arg-type]


def frames_of(view: LiveView) -> AsyncGenerator[bytes, None]:
    return view.watch("")


async def first_of(frames: Awaitable[bytes]) -> dict[str, Any]:
    return dict(json.loads(await asyncio.wait_for(frames, 5)))


async def test_all_viewers_share_one_look_and_the_last_one_ends_it(engine: FakeEngine, view: LiveView) -> None:
    viewers = [frames_of(view) for _ in range(5)]
    frames = await asyncio.gather(*(anext(viewer) for viewer in viewers))
    assert len({frame.partition(b",")[2] for frame in frames}) == 1, "but for the time"
    assert engine.num_looks == 1
    start, looks = time.monotonic(), engine.num_looks
    for _ in range(3):
        await asyncio.gather(*(anext(viewer) for viewer in viewers))
    assert engine.num_looks - looks == 3
    assert time.monotonic() - start > 2 * INTERVAL
    for viewer in viewers[1:]:
        await viewer.aclose()
    await first_of(anext(viewers[0]))
    await viewers[0].aclose()
    looks = engine.num_looks
    await asyncio.sleep(2.5 * INTERVAL)
    assert engine.num_looks == looks
    again = frames_of(view)
    await first_of(anext(again))
    await again.aclose()


async def test_what_is_counted_of_answers_is_told(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.delay = 0.01
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2})
    frame = (await client.get(PATH)).json()
    assert (frame["output_tokens"], frame["first_tokens"]) == (10, 2)
    assert 0.02 <= frame["first_token_seconds"] < 2


async def test_large_caches_are_looked_at_less_often(engine: FakeEngine, view: LiveView) -> None:
    engine.look = lambda: look(blocks=bytes(100_000))
    viewer = frames_of(view)
    await anext(viewer)
    start = time.monotonic()
    await anext(viewer)
    await viewer.aclose()
    assert time.monotonic() - start > 0.4


async def test_a_long_step_is_waited_for_once(
    engine: FakeEngine, view: LiveView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.metrics.live.PATIENCE", 0.05)
    engine.delay = 0.7
    viewer = frames_of(view)
    frame = await first_of(anext(viewer))
    assert (frame["status"], frame["engine"]) == ("ok", None)
    assert "long step" in frame["reason"]
    while frame["engine"] is None:
        assert engine.num_looks == 1
        frame = await first_of(anext(viewer))
    await viewer.aclose()


@pytest.mark.parametrize("end", ["draining", "dead"])
async def test_viewers_do_not_hold_up_the_end(client: httpx.AsyncClient, engine: FakeEngine, end: str) -> None:
    viewer = asyncio.create_task(client.get(PATH, headers=EVENTS))
    while not engine.num_looks:
        await asyncio.sleep(0.01)
    if end == "dead":
        engine.is_dead = True
    else:
        serving_of(client).drained_by = time.monotonic() + 30
    answer = await asyncio.wait_for(viewer, 2)
    assert 1 <= answer.text.count("data: ") <= 2


async def test_a_fault_reaches_the_viewers(engine: FakeEngine, view: LiveView) -> None:
    def broken() -> Snapshot:
        raise ZeroDivisionError

    engine.look = broken
    viewer = frames_of(view)
    with pytest.raises(ZeroDivisionError):
        await anext(viewer)
    engine.look = look
    again = frames_of(view)
    assert (await first_of(anext(again)))["status"] == "ok"
    await again.aclose()


def test_frames_stream_as_events_until_the_viewer_leaves(url: str, engine: FakeEngine) -> None:
    with httpx.stream("GET", f"{url}{PATH}", headers=EVENTS, timeout=10) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line)
        frames = [json.loads(next(lines).removeprefix("data: ")) for _ in range(3)]
    assert frames[0]["time"] < frames[1]["time"] < frames[2]["time"]
    time.sleep(2 * INTERVAL)
    looks = engine.num_looks
    time.sleep(2 * INTERVAL)
    assert engine.num_looks == looks


def test_a_stream_ends_with_the_error_that_broke_it(url: str, engine: FakeEngine) -> None:
    with httpx.stream("GET", f"{url}{PATH}", headers=EVENTS, timeout=10) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)

        def broken() -> Snapshot:
            raise ZeroDivisionError

        engine.look = broken
        rest = list(lines)
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "server_error"
