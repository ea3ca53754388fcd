"""GET /v1/requests/{id} and the header Server-Timing: what happened to a request, and why it took its time."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from configs.errors import EngineDead
from configs.settings import ServerConfig
from engine.messages import RequestSnapshot, Snapshot
from scheduler.timeline import Chunk, Timeline
from server.app import create_app
from server.metrics.live import PATIENCE
from server.metrics.records import ChoiceRecord, RequestRecord
from server.metrics.timeline import reasons
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine
from tests.server.test_every_route import BODIES
from tests.server.test_reliability import EMBEDDING, GENERATING

ID = {"x-request-id": "mine"}


async def timeline(client: httpx.AsyncClient, request_id: str = "mine") -> dict[str, Any]:
    answer = await client.get(f"/v1/requests/{request_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def milliseconds(header: str) -> dict[str, float]:
    entries = re.fullmatch(r"(\w+;dur=\d+\.\d)(, \w+;dur=\d+\.\d)*", header)
    assert entries, header
    return {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", header)}


@pytest.mark.parametrize("path", GENERATING + EMBEDDING)
async def test_whole_answers_say_where_their_time_went(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    engine.delay = 0.005
    answer = await client.post(
        path, json={"stream": False, **BODIES[path]} if path.startswith("/api") else BODIES[path], headers=ID
    )
    assert answer.status_code == 200, answer.text
    timing = milliseconds(answer.headers["server-timing"])
    parts = sum(timing[name] for name in ("prepare", "queue", "prefill", "decode"))
    assert 5 <= parts <= timing["total"] + 0.3
    assert (path in EMBEDDING) == ("ttft" not in timing)
    told = await timeline(client)
    assert (told["id"], told["route"], told["http_status"], told["status"]) == ("mine", path, 200, "ended")
    assert told["model"] == MODEL
    for choice in told["choices"]:
        assert 0 <= choice["queued"] <= choice["admitted"] <= (choice["first_token"] or 9) <= 9
        assert choice["ended"] <= told["seconds"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"]
)
async def test_the_answers_id_is_as_good_as_the_requests(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json=BODIES[path], headers=ID)
    name = answer.json().get("id") or answer.json()["request_id"]
    assert await timeline(client, name) == await timeline(client)
    assert (await timeline(client))["response_id"] == name
    assert (await timeline(client, answer.headers["x-request-id"]))["id"] == "mine"


async def test_a_stream_has_a_timeline_when_it_is_over(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "abc", "stream": True, "n": 2}, headers=ID)
    assert "server-timing" not in answer.headers
    told = await timeline(client)
    assert told["num_choices"] == len(told["choices"]) == 2
    for choice in told["choices"]:
        assert (choice["num_prompt_tokens"], choice["num_output_tokens"], choice["finish_reason"]) == (4, 6, "stop")
        assert (choice["num_decode_steps"], choice["mean_step_requests"]) == (5, 2.0)
        assert choice["chunks"] == [
            {"at": choice["queued"], "num_tokens": 4, "num_step_tokens": 4, "num_step_requests": 1}
        ]
        assert choice["time_per_output_token"] == pytest.approx((choice["ended"] - choice["first_token"]) / 5, abs=1e-3)
    assert told["why"][0].startswith("of its 2 choices")


async def test_what_runs_is_told_as_the_engine_sees_it(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script, engine.delay = lambda prompt, params: "a" * 900, 0.002
    work = asyncio.create_task(client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 900}, headers=ID))
    while not engine.num_tokens:
        await asyncio.sleep(0.005)
    [(name, running)] = engine.core.requests.items()
    snapshot = RequestSnapshot(name, True, 4, 24, 23, [0, 7, 8], running.timeline)
    engine.look = lambda: Snapshot(engine.stats(), [snapshot], b"")
    told = await timeline(client)
    [choice] = told["choices"]
    assert (told["status"], told["http_status"], choice["status"], choice["ended"]) == (
        "running",
        None,
        "running",
        None,
    )
    assert (choice["num_output_tokens"], choice["num_blocks"]) == (20, 2)
    engine.look = lambda: Snapshot(engine.stats(), [], b"")
    assert (await timeline(client))["choices"][0]["num_blocks"] is None, (
        "it has ended there, and its last words are on their way"
    )
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    told = await timeline(client)
    assert (told["status"], told["choices"][0]["finish_reason"]) == ("ended", "abort")
    assert told["why"][-1] == "it ended because the client went away"


async def test_polls_share_looks_at_a_large_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Each look costs the engine's step some time."""
    engine.script, engine.delay = lambda prompt, params: "a" * 900, 0.002
    work = asyncio.create_task(client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 900}, headers=ID))
    while not engine.num_tokens:
        await asyncio.sleep(0.005)
    engine.look = lambda: Snapshot(engine.stats(), [], bytes(100_000))
    for _ in range(5):
        await asyncio.gather(*(timeline(client) for _ in range(5)), client.get("/v1/engine/live"))
    assert engine.num_looks <= 2
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize("kind", ["dead", "long"])
async def test_an_engine_that_does_not_answer_holds_up_nobody(
    client: httpx.AsyncClient, engine: FakeEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.delay = 2
    work = asyncio.create_task(client.post("/v1/completions", json={"prompt": "abc"}, headers=ID))
    while not engine.requests:
        await asyncio.sleep(0.005)

    def dead() -> Snapshot:
        raise EngineDead

    engine.look = dead
    engine.delay = 2 if kind == "long" else 0
    monkeypatch.setattr("server.metrics.live.PATIENCE", 0.05 if kind == "long" else PATIENCE)
    told = await timeline(client)
    assert told["choices"][0]["status"] == "waiting"
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_a_response_in_the_background_is_over_when_its_work_is(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.delay = 0.01
    answer = await client.post("/v1/responses", json={"input": "abc", "background": True}, headers=ID)
    assert "server-timing" not in answer.headers
    assert (await timeline(client, answer.json()["id"]))["status"] == "running"
    while (await timeline(client))["status"] == "running":
        await asyncio.sleep(0.01)
    told = await timeline(client)
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["seconds"] >= 0.05


async def test_what_was_refused_is_told_too(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json={"prompt": "x", "temperature": -1}, headers=ID)
    told = await timeline(client)
    assert (told["http_status"], told["error"], told["choices"]) == (400, "invalid_request_error", [])
    assert told["why"] == ["the engine was not asked"]
    engine.is_full = True
    await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "full"})
    assert (await timeline(client, "full"))["error"] == "queue_full"
    engine.is_full, engine.fail_after = False, (0, RuntimeError("secret"))
    answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "broken"})
    told = await timeline(client, "broken")
    assert (answer.status_code, told["error"], told["choices"][0]["finish_reason"]) == (500, "server_error", "error")
    assert "secret" not in str(told)


async def test_only_the_latest_are_kept(engine: FakeEngine) -> None:
    app = create_app(engine, ServerConfig(max_kept_timelines=5), MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for number in range(4):
            await client.post("/v1/completions", json={"prompt": "x", "n": 2}, headers={"x-request-id": f"r{number}"})
        statuses = [(await client.get(f"/v1/requests/r{number}")).status_code for number in range(4)]
        assert statuses == [404, 404, 200, 200]
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r3"})
        assert (await timeline(client, "r3"))["response_id"] == answer.json()["id"], "the newest of a name"
        for _ in range(3):
            await client.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert (await client.get("/v1/requests/r3")).status_code == 404


async def test_of_very_many_choices_some_are_kept(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "x", "n": 100, "max_tokens": 1}, headers=ID)
    told = await timeline(client)
    assert (told["num_choices"], len(told["choices"])) == (100, RequestRecord.MAX_CHOICES)


async def test_unknown_ids_and_requests_without_a_body_have_none(client: httpx.AsyncClient) -> None:
    await client.get("/v1/models", headers=ID)
    for name in ("mine", "a/b", "-"):
        answer = await client.get(f"/v1/requests/{name}")
        assert answer.status_code == 404
        assert "--max-kept-timelines" in answer.json()["error"]["message"]


def record(choice: ChoiceRecord | None, *, ended: float = 20.0, **fields: Any) -> RequestRecord:
    made = RequestRecord(0.0, 0.0, "POST", ended=ended, **fields)
    if choice is not None:
        made.add(choice)
    return made


def choice(timeline: Timeline, **fields: Any) -> ChoiceRecord:
    known = {
        "first_token": 12.0,
        "last_token": 20.0,
        "ended": 20.0,
        "finish_reason": "length",
        "num_output_tokens": 81,
    } | fields
    known.setdefault("is_structured", False)
    return ChoiceRecord(
        request_id="c",
        owner="",
        received=0.0,
        num_prompt_tokens=3000,
        max_tokens=None,
        temperature=1.0,
        top_p=1.0,
        timeline=timeline,
        **known,
    )


def test_the_wait_in_the_queue_is_told_with_its_causes() -> None:
    waited = choice(Timeline(queued=0.2, admitted=10.2))
    causes = [(0.0, None), (0.5, "blocks"), (3.5, "seats"), (4.5, "blocks"), (9.0, None)]
    assert reasons(record(waited), causes, 99.0)[:3] == [
        "it waited 10.00 s for its turn",
        "for 7.50 s of that, the KV cache had no room for it (--kv-cache-tokens)",
        "for 1.00 s of that, as many requests ran as may (--max-num-seqs)",
    ]
    still = choice(Timeline(queued=0.2), first_token=None, last_token=None, ended=None, finish_reason=None)
    assert reasons(record(still, ended=None), [(0.0, "tokens")], 6.2) == [
        "it has waited 6.00 s for its turn by now",
        "for 6.00 s of that, the steps were full with others' tokens (--max-num-batched-tokens)",
    ]
    grammar = choice(Timeline(queued=0.2, admitted=10.2), is_structured=True)
    assert "part of that may be its grammar, which is compiled before it may begin" in reasons(
        record(grammar), [], 99.0
    )


def test_the_prompt_is_told_with_its_steps() -> None:
    one = choice(Timeline(queued=0.2, admitted=0.2), num_cached_tokens=1000)
    for number in range(4):
        one.timeline.add_chunk(Chunk(number, 500, 625, 3))
    said = reasons(record(one), [], 99.0)
    assert said[0] == (
        "its prompt of 3000 tokens, 1000 of them cached, took 11.80 s in 4 steps, of whose tokens 20% were others'"
    )
    alone = choice(Timeline(queued=0.2, admitted=0.2))
    alone.timeline.add_chunk(Chunk(0, 3000, 3000, 1))
    assert reasons(record(alone), [], 99.0)[0] == "its prompt of 3000 tokens took 11.80 s in 1 step"
    assert reasons(record(choice(Timeline(queued=0.1))), [], 99.0)[0] == "its prompt of 3000 tokens took 11.90 s"


def test_preemptions_and_batches_are_told() -> None:
    one = choice(
        Timeline(queued=0.2, admitted=12.0, num_preemptions=3, num_recomputed_tokens=700, mean_step_requests=31.4)
    )
    said = reasons(record(one), [], 99.0)
    assert said[-2:] == [
        "it was preempted 3 times, as the KV cache was full: 700 tokens were computed again",
        "80 tokens behind the first one took 8.00 s, 100.0 ms each, in steps of 31.4 requests on average",
    ]
    alone = choice(Timeline(queued=0.2, admitted=12.0, num_preemptions=1, mean_step_requests=1.0))
    said = reasons(record(alone), [], 99.0)
    assert said[-2].startswith("it was preempted once")
    assert said[-1].endswith(", alone in its steps")
    running = choice(
        Timeline(queued=0.2, admitted=12.0), last_token=None, ended=None, finish_reason=None, num_output_tokens=0
    )
    assert reasons(record(running, ended=None), [], 20.0)[-1] == "the tokens behind the first one took 8.00 s"


def test_what_came_before_and_behind_the_engine_is_told() -> None:
    late = choice(Timeline(queued=5.0, admitted=5.0))
    said = reasons(record(late, ended=26.0), [], 99.0)
    assert said[0] == "5.00 s passed before the engine had it: its body, its tokens, or no engine was there"
    assert said[-1] == "6.00 s more passed until the client had taken the answer"
    quick = choice(Timeline(queued=0.0, admitted=0.0), first_token=0.001, last_token=0.004, ended=0.004)
    assert reasons(record(quick, ended=0.005), [], 99.0) == ["nothing held it up"]
    assert reasons(record(None, ended=None), [], 99.0) == ["the engine has not been asked yet"]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("timeout", "it ended because its time was over"),
        ("abort", "it ended because the client went away"),
        ("error", "it failed: engine_dead"),
    ],
)
def test_a_bad_end_is_told(reason: str, said: str) -> None:
    assert said in reasons(record(choice(Timeline(queued=0.1), finish_reason=reason), error="engine_dead"), [], 99.0)


def test_of_several_choices_the_slowest_is_told() -> None:
    both = record(choice(Timeline(queued=0.2, admitted=10.2)))
    both.add(choice(Timeline(queued=0.1), ended=9.0, last_token=9.0, first_token=8.0))
    said = reasons(both, [], 99.0)
    assert said[0] == "of its 2 choices, c took longest"
    assert said[1] == "it waited 10.00 s for its turn"
