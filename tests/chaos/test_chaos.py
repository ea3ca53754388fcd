"""The short form of the run, and that each kind of fault would be seen."""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.answers import Answer, Choice, Events, Violation
from tests.chaos.dialects import read_event, read_whole
from tests.chaos.disturbances import Disturbance, Disturbances
from tests.chaos.jobs import Job
from tests.chaos.plan import Plan
from tests.chaos.report import Report, judge_memory
from tests.chaos.run import Run
from tests.chaos.spectator import check_frame
from tests.chaos.verdicts import Attempt, judge
from tests.chaos.watch import MB, Watch, parse_metrics, slope, total


@pytest.mark.timeout(180)
def test_a_short_chaos(tmp_path: Path) -> None:
    report = Run(Plan(seconds=8, seed=5, num_clients=8, num_jobs=40, is_short=True), tmp_path).run()
    print(report)
    assert not report.violations
    assert sum(report.outcomes[name] for name in ("equal", "timeout", "left")) > 50
    assert report.num_kills > 0


JOB = Job("0", "/v1/completions", {"prompt": "x", "max_tokens": 3})
SOLO = Answer(
    200, choices={0: Choice("abc", [1, 2, 3], "length", tokens=["a"], logprobs=[-0.5])}, counts=(1, 3), is_whole=True
)


def error(status: int, code: str, retry_after: str = "1") -> Answer:
    return Answer(status, {"retry-after": retry_after}, error={"message": "", "code": code}, is_whole=True)


def verdict(answer: Answer, *disturbances: Disturbance, **fields: Any) -> str:
    """Of an attempt from second 10 to second 11."""
    attempt = Attempt("0", JOB, answer=answer, began=10.0, ended=11.0, **fields)
    known = Disturbances()
    known.all = list(disturbances)
    return judge(attempt, SOLO, known)


def answered(**fields: Any) -> Answer:
    """As alone, but for fields of the answer or of its choice."""
    answer = copy.deepcopy(SOLO)
    for name, value in fields.items():
        setattr(answer if hasattr(answer, name) else answer.choices[0], name, value)
    return answer


KILL, STOP = Disturbance(10.5, kills=[10.5]), Disturbance(10.5, is_stop=True)
EARLIER = Disturbance(8.0, 9.0, kills=[8.0], is_stop=True)


def test_what_may_be() -> None:
    assert verdict(answered()) == "equal"
    assert (
        verdict(answered(text="ab", token_ids=[1, 2], finish_reason="timeout", tokens=[], logprobs=[]), timeout=1)
        == "timeout"
    )
    assert verdict(answered(text="a", token_ids=[1], finish_reason=None, is_whole=False), has_left=True) == "left"
    assert verdict(error(503, "engine_dead"), KILL) == "engine_dead"
    assert (
        verdict(answered(text="a", token_ids=[1], error={"message": "", "code": "engine_dead"}), KILL) == "engine_dead"
    )
    assert verdict(error(503, "engine_frozen"), STOP) == "engine_frozen"
    assert verdict(error(429, "queue_full")) == "queue_full"


@pytest.mark.parametrize(
    "answer",
    [
        answered(text="abd"),
        answered(text="abcd"),
        answered(text="ab"),
        answered(text="bc", finish_reason=None, is_whole=False),
        answered(token_ids=[1, 2]),
        answered(token_ids=[1, 2, 4]),
        answered(token_ids=None),
        answered(finish_reason="stop"),
        answered(finish_reason=None),
        answered(finish_reason="timeout"),
        answered(stop_reason="c"),
        answered(logprobs=[-0.6]),
        answered(logprobs=[]),
        answered(tokens=["b"]),
        answered(counts=(1, 2)),
        answered(is_whole=False),
        answered(choices={}),
        answered(choices={0: SOLO.choices[0], 1: SOLO.choices[0]}),
        answered(error={"message": "", "code": "server_error"}),
        error(500, "server_error"),
        error(503, "engine_dead"),
        error(503, "engine_restarting"),
        error(503, "engine_frozen"),
        error(503, "shutting_down"),
        error(429, "queue_full", retry_after="0"),
        error(408, "timeout"),
        error(400, "invalid"),
    ],
    ids=repr,
)
def test_what_may_not_be(answer: Answer) -> None:
    with pytest.raises(Violation):
        verdict(answer, EARLIER)


def test_no_kill_excuses_another_text_or_a_late_end() -> None:
    cut = answered(text="x", token_ids=None, error={"message": "", "code": "engine_dead"})
    for answer, kill in ((cut, KILL), (error(503, "engine_dead"), Disturbance(5.0, kills=[5.0]))):
        with pytest.raises(Violation):
            verdict(answer, kill)


def test_a_deadline_holds() -> None:
    with pytest.raises(Violation, match="deadline"):
        verdict(answered(), timeout=-3.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            b'{"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}',
            b'{"choices": [{"index": 0, "text": "b"}]}',
        ),
        (b"[DONE]", b"[DONE]"),
        (b'{"error": {"message": "gone"}}', b'{"choices": []}'),
    ],
)
def test_nothing_comes_behind_the_end(first: bytes, second: bytes) -> None:
    answer = Answer(200)
    read_event("/v1/completions", answer, first)
    with pytest.raises(Violation, match="behind the"):
        read_event("/v1/completions", answer, second)


def test_an_error_has_a_status_and_a_status_an_error() -> None:
    with pytest.raises(Violation):
        read_whole("/v1/completions", Answer(500), b"{}")


def test_events_are_cut_wherever_the_pieces_end() -> None:
    whole = b"event: a\ndata: {1}\n\ndata: {2}\n\n"
    for cut in range(len(whole)):
        events = Events(b"\n\n")
        assert [*events.push(whole[:cut]), *events.push(whole[cut:])] == [b"{1}", b"{2}"]
        assert events.rest == b""


def frame(blocks: list[int], *held: list[int], running: int = 1, used: int = 2) -> dict[str, Any]:
    requests = [{"blocks": one, "is_running": True} for one in held]
    engine = {"blocks": blocks, "num_blocks": 6, "running": running, "used_blocks": used, "requests": requests}
    return {"reason": "", "engine": engine}


def test_blocks_and_their_holders_agree() -> None:
    check_frame(frame([1, 0, 2, 1, 1, 255, 2, 0], [1, 2]))
    check_frame(frame([1, 0, 1, 2, 1, 1, 3, 0], [1, 2], [1, 1], running=2))
    for wrong in (
        frame([1, 0, 3, 1, 2, 0], [1, 2]),  # one that nobody holds
        frame([1, 0, 1, 1, 4, 0], [1, 2]),  # one that is free for others
        frame([1, 0, 2, 1, 3, 0], [1, 2], [1, 1], running=2),  # one that two hold and one counts
        frame([1, 0, 2, 1, 3, 0], [1, 2], running=2),
        frame([1, 0, 2, 1, 3, 0], [1, 2], used=3),
        {"reason": "", "engine": None},
    ):
        with pytest.raises(Violation):
            check_frame(wrong)


def test_the_slope_of_a_line() -> None:
    assert slope([(x, 3 * x + 7) for x in range(10)]) == pytest.approx(3)
    assert slope([(0.0, 1.0), (1.0, 2.0), (2.0, 1.0)]) == 0
    assert slope([(1.0, 5.0)]) == 0


@pytest.mark.parametrize(("growth", "is_flat"), [(0.5, True), (2.0, False)])
def test_memory_that_grows_is_told(growth: float, is_flat: bool) -> None:
    """MB per minute, behind a warm-up with much more."""
    report, watch = Report(0), Watch.__new__(Watch)
    samples = [(float(at), 50 * MB + min(at, 30) * MB + at / 60 * growth * MB) for at in range(320)]
    for watch.server_memory, watch.core_memory in (([(0.0, 1.0), (1.0, 1.0)], {7: samples}), (samples, {})):
        report.violations = []
        judge_memory(report, watch)
        assert (not report.violations) is is_flat


def test_metrics_are_read() -> None:
    metrics = parse_metrics('# HELP a b\na{x="1 2"} 3.0\na{x="2"} 4.0\nab 5\n')
    assert metrics == {'a{x="1 2"}': 3.0, 'a{x="2"}': 4.0, "ab": 5.0}
    assert total(metrics, "a") == 7
