"""The load tester's parts: arrivals, data, answers, figures, intervals, the client's own lateness, the search."""

import argparse
import asyncio
import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UsageError
from server.commands.bench.flags import Lengths
from server.commands.bench.load_test import arrivals, confidence, flag_types
from server.commands.bench.load_test.answer import Answer, BadAnswer, error_text
from server.commands.bench.load_test.datasets import (
    GENERATORS,
    Draws,
    needs_chat,
    read_lines,
    widened,
)
from server.commands.bench.load_test.driver import Run
from server.commands.bench.load_test.http_client import Address
from server.commands.bench.load_test.measure import (
    THROUGHPUTS,
    concurrency,
    figures,
    is_good,
    peak_concurrency,
    tokens_by_second,
    wrong_figures,
)
from server.commands.bench.load_test.plots import Line, line_plot
from server.commands.bench.load_test.prompts import TOKEN_IDS, PromptMaker
from server.commands.bench.load_test.saturation import ClientHealth, ClientMonitor
from server.commands.bench.load_test.search import Bracket, highest
from server.commands.bench.load_test.trial import combine


def intervals(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_steady_arrivals_have_the_rate_and_the_variance_that_were_asked_for(burstiness: float) -> None:
    times = arrivals.steady(20_000, 8.0, burstiness, random.Random(1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20_000 / 8)
    assert variance(intervals(times)) == pytest.approx((1 / 8) ** 2 / burstiness, rel=0.1)


def test_poisson_arrivals_are_as_often_in_a_second_as_they_vary() -> None:
    counts = np.bincount([int(time) for time in arrivals.steady(20_000, 8.0, 1.0, random.Random(2))])[:-1]
    assert counts.var() == pytest.approx(8.0, rel=0.1)


def test_infinite_burstiness_is_a_metronome() -> None:
    assert arrivals.steady(4, 2.0, math.inf, random.Random(0)) == [0.5, 1.0, 1.5, 2.0]


def test_ramps_grow_evenly_or_by_a_factor() -> None:
    assert arrivals.Ramp("linear", 1, 3).rates(5) == [1, 1.5, 2, 2.5, 3]
    assert arrivals.Ramp("exponential", 1, 16).rates(5) == pytest.approx([1, 2, 4, 8, 16])
    assert arrivals.Ramp("linear", 2, 9).rates(1) == [2]
    times = arrivals.ramped(5, arrivals.Ramp("exponential", 1, 16), math.inf, random.Random(0))
    assert intervals(times) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16])


def test_ramped_poisson_arrivals_have_the_ramps_mean() -> None:
    ramp = arrivals.Ramp("linear", 1, 20)
    ends = [arrivals.ramped(100, ramp, 1.0, random.Random(seed))[-1] for seed in range(200)]
    assert fmean(ends) == pytest.approx(sum(1 / rate for rate in ramp.rates(100)), rel=0.05)


# --- data -----------------------------------------------------------------------------------------------------------


def arguments(**given: Any) -> argparse.Namespace:
    defaults = {
        "input_len": Lengths(10, 10),
        "output_len": Lengths(5, 5),
        "random_range_ratio": 0.0,
        "random_prefix_len": 0,
        "turns": 1,
        "prefix_repetition_prefix_len": 8,
        "prefix_repetition_suffix_len": 3,
        "prefix_repetition_num_prefixes": 4,
    }
    return argparse.Namespace(**{**defaults, **given})


def test_random_lengths_fill_their_range() -> None:
    assert widened(Lengths(10, 10), 0.25) == Lengths(7, 13)
    assert widened(Lengths(1, 1), 0.9) == Lengths(1, 2)
    samples = GENERATORS["random"](arguments(random_range_ratio=0.3), TOKEN_IDS, 500, Draws.of(0, 0))
    assert {len(ask.prompt) for [ask] in samples} == set(range(7, 14))
    assert {ask.output_len for [ask] in samples} == set(range(3, 8))


def test_another_side_has_equal_lengths_and_other_contents_and_another_run_has_neither() -> None:
    def made(run: object, side: str) -> list[Any]:
        options = arguments(random_range_ratio=0.5)
        return [ask for [ask] in GENERATORS["random"](options, TOKEN_IDS, 50, Draws.of(7, run, side))]

    a, b, c = made(0, "A"), made(0, "B"), made(1, "A")
    assert a == made(0, "A")
    sizes = [[(len(ask.prompt), ask.output_len) for ask in asks] for asks in (a, b, c)]
    assert sizes[0] == sizes[1] != sizes[2]
    assert not any(one.prompt == other.prompt for one, other in zip(a, b, strict=True))
    assert Draws.of(7, 0, "A").arrivals.random() == Draws.of(7, 0, "B").arrivals.random()


def test_a_random_prefix_is_shared_by_all_and_comes_on_top() -> None:
    samples = GENERATORS["random"](arguments(random_prefix_len=6), TOKEN_IDS, 20, Draws.of(0, 0))
    prompts = [tuple(ask.prompt) for [ask] in samples]
    assert {prompt[:6] for prompt in prompts} == {prompts[0][:6]}
    assert {len(prompt) for prompt in prompts} == {16}
    assert len({prompt[6:] for prompt in prompts}) == 20


def test_shared_prefixes_begin_equal_numbers_of_prompts() -> None:
    samples = GENERATORS["prefix_repetition"](arguments(), TOKEN_IDS, 40, Draws.of(0, 0))
    prefixes = [tuple(ask.prompt[:8]) for [ask] in samples]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [10] * 4
    assert len({tuple(ask.prompt) for [ask] in samples}) == 40
    assert {len(ask.prompt) for [ask] in samples} == {11}
    assert prefixes[:10] != [prefixes[0]] * 10


def test_words_are_as_many_as_their_tokens_need() -> None:
    maker = PromptMaker("", lambda draw: draw.choice(["a", "b"]), 2.5)
    assert len(maker.prompt(maker.units(random.Random(0), 50)).split()) == 20


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "c"}]
    lines = [
        {"prompt": "a", "output_len": 3},
        {"prompt": [1, 2], "output_tokens": 4},
        {"messages": messages, "max_tokens": 5},
        {"turns": ["d", "e"]},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    samples = read_lines(str(file), Lengths(6, 8))
    assert samples == [[("a", 3)], [([1, 2], 4)], [(messages, 5)], [("d", 7), ("e", 7)]]
    assert [needs_chat([sample]) for sample in samples] == [False, False, True, True]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no prompts"),
        ("x", "line 1"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2"),
        ('{"output_len": 3}', "exactly one"),
        ('{"prompt": ""}', "exactly one"),
        ('{"prompt": "a", "turns": ["b"]}', "exactly one"),
        ('{"prompt": "a", "output_len": 0}', "at least 1"),
    ],
)
def test_bad_files_are_refused_by_line(text: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=word):
        read_lines(str(file), Lengths(1, 1))


# --- answers --------------------------------------------------------------------------------------------------------

STREAM = (
    b'data: {"choices": [{"text": "a"}]}\r\n\r\n'
    b": a comment\n\n"
    b'event: x\ndata:{"choices": [{"text": "", "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": '
    b'{"cached_tokens": 4}}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_read_however_they_are_cut(cuts: list[int]) -> None:
    answer = Answer(0.0)
    edges = [0, *sorted(cuts), len(STREAM)]
    for begin, end in pairwise(edges):
        answer.receive(STREAM[begin:end], 1.0)
    answer.finish()
    assert answer.token_times == [1.0, 1.0]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (7, 4, 2)
    assert answer.text == "a"


def chunk(**delta: Any) -> bytes:
    finish = delta.pop("finish_reason", None)
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


def test_neither_a_role_nor_a_reason_is_a_token() -> None:
    answer = Answer(0.0)
    pieces = [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="hm"),
        chunk(role="assistant", content="a"),
        chunk(tool_calls=[{"index": 0}]),
        chunk(content=""),
        chunk(finish_reason="stop"),
    ]
    for now, piece in enumerate(pieces, start=1):
        answer.receive(piece, float(now))
    answer.finish()
    assert answer.token_times == [2, 3, 4, 5]
    assert answer.end == 6
    assert not answer.has_usage
    assert answer.output_tokens == 4


def test_an_answer_of_one_token_without_text_has_a_first_token() -> None:
    answer = Answer(1.0)
    answer.receive(chunk(role="assistant", content=""), 2.0)
    answer.receive(chunk(finish_reason="stop"), 3.0)
    answer.finish()
    assert (answer.ttft, answer.output_tokens, answer.tpot) == (2.0, 1, None)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"data: nonsense\n\n", "not an event"),
        (b'data: {"choices": 3}\n\n', "not an event"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'{"choices": [{"text": "whole"}]}', "no choices"),
    ],
)
def test_what_is_no_stream_of_the_protocol_is_an_error(data: bytes, word: str) -> None:
    def read() -> None:
        answer = Answer(0.0)
        answer.receive(data, 1.0)
        answer.finish()

    with pytest.raises(BadAnswer, match=word):
        read()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "a\\n b"}}', "a b"),
        (b'{"detail": "b"}', "b"),
        (b'{"error": "c"}', "c"),
        (b"<p>d</p>", "<p>d</p>"),
        (b"[1]", "[1]"),
    ],
)
def test_error_texts(body: bytes, text: str) -> None:
    assert error_text(body) == text


def test_addresses() -> None:
    assert Address.parse("http://a") == ("a", 80, False, "")
    assert Address.parse("https://a:8/v1/") == ("a", 8, True, "/v1")
    assert Address.parse("http://[::1]:8000").host_header == "[::1]:8000"
    for url in ("a:8000", "ftp://a", "http://", "http://a?b", "http://u:p@a"):
        with pytest.raises(ValueError, match="URL"):
            Address.parse(url)


# --- figures --------------------------------------------------------------------------------------------------------


def answered(intended: float, started: float, token_times: list[float], end: float, tokens: int) -> Answer:
    return Answer(intended, started, token_times, end, prompt_tokens=10, output_tokens=tokens, has_usage=True)


def run_by_hand() -> Run:
    failed = Answer(0.0, 0.0, end=0.9, error="HTTP 503")
    answers = [
        answered(0.0, 0.0, [0.1, 0.2, 0.3], 0.3, 3),
        failed,
        answered(0.5, 0.6, [0.9, 1.7], 1.9, 6),
        answered(1.0, 1.0, [1.05], 1.05, 1),
    ]
    return Run(answers, duration=2.0)


def test_figures_by_hand() -> None:
    found = figures(run_by_hand(), {"ttft": 200.0, "tpot": 150.0}, [50, 99], ["ttft", "tpot", "itl", "e2el"])
    assert (found["completed"], found["failed"], found["duration"]) == (3, 1, 2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 10)
    assert (found["request_throughput"], found["output_throughput"]) == (1.5, 5.0)
    assert found["total_token_throughput"] == 20.0
    # in ms: TTFT 100, 400, 50; TPOT 100 and (1.9 - 0.9) / 5 = 200, none of one; ITL 100, 100, 800; E2EL 300, 1400, 50
    assert found["mean_ttft_ms"] == pytest.approx(550 / 3)
    assert (found["median_ttft_ms"], found["p50_ttft_ms"]) == pytest.approx((100, 100))
    assert found["p99_ttft_ms"] == pytest.approx(100 + 0.98 * 300)
    assert found["mean_tpot_ms"] == pytest.approx(150)
    assert found["std_tpot_ms"] == pytest.approx(50)
    assert found["mean_itl_ms"] == pytest.approx(1000 / 3)
    assert found["median_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx(1750 / 3)
    # the first keeps both limits and the last the only one it has; the failed one is not good
    assert found["request_goodput"] == 1.0
    assert found["good_share"] == 0.5


def test_limits_include_their_value() -> None:
    [first, failed, slow, single] = run_by_hand().answers
    assert is_good(first, {"e2el": 300.0})
    assert not is_good(first, {"e2el": 299.0})
    assert not is_good(failed, {})
    assert not is_good(slow, {"ttft": 1000, "tpot": 199})
    assert is_good(single, {"tpot": 0})


def test_figures_of_nothing_are_none_and_not_zero() -> None:
    found = figures(Run(duration=1.0), {"ttft": 1.0}, [99], ["ttft", "itl"])
    assert found["mean_ttft_ms"] is found["p99_itl_ms"] is found["good_share"] is None
    assert found["request_throughput"] == 0


def test_tokens_are_counted_in_the_second_they_came() -> None:
    answers = run_by_hand().answers
    assert tokens_by_second([answers[0], answers[2]], 0.0) == [3 + 3, 3]


def test_requests_under_way() -> None:
    answers = [Answer(0, 0.0, end=1.0), Answer(0, 0.5, end=2.0), Answer(0, 1.0, end=1.5)]
    assert concurrency(answers, 0.0) == [(0, 1), (0.5, 2), (1.0, 1), (1.0, 2), (1.5, 1), (2.0, 0)]
    assert peak_concurrency(answers) == 2


# --- intervals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 2, 5, 12, 30])
def test_quantiles_of_students_t(freedom: int) -> None:
    """The density between the quantiles integrates to 95 %."""
    x = np.linspace(0, confidence.T_975[freedom - 1], 200_001)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    density = scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=2e-4)


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    draw = random.Random(0)
    around = [confidence.interval([draw.gauss(5, 2) for _ in range(4)]) for _ in range(4000)]
    assert sum(each is not None and each.low <= 5 <= each.high for each in around) / 4000 == pytest.approx(
        0.95, abs=0.012
    )
    assert confidence.interval([1.0]) is None


def test_ratios_are_of_pairs() -> None:
    value, around = confidence.ratio([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert value == pytest.approx(2)
    assert around == pytest.approx((2, 2))
    value, around = confidence.ratio([1.0], [3.0])
    assert value == pytest.approx(3)
    assert around is None


def test_repeats_are_added_or_averaged() -> None:
    client = {"bottleneck": False, "reasons": {}, "cpu_share": 0.1}
    busy = {"bottleneck": True, "reasons": {"itl": "late"}, "cpu_share": 0.5}
    first = {"completed": 3, "mean_ttft_ms": 10.0, "peak_concurrent_requests": 4, "mean_itl_ms": 1.0, "client": client}
    second = {"completed": 5, "mean_ttft_ms": 14.0, "peak_concurrent_requests": 2, "mean_itl_ms": None, "client": busy}
    found = combine([first, second])
    assert (found["completed"], found["mean_ttft_ms"], found["peak_concurrent_requests"]) == (8, 12.0, 4)
    assert found["mean_itl_ms"] is None
    half = 12.706 * math.sqrt(8) / math.sqrt(2)
    assert found["confidence_95"] == {"mean_ttft_ms": pytest.approx([12 - half, 12 + half])}
    assert found["client"] == busy
    assert found["repeats"] == [first, second]
    assert combine([first]) == first


# --- the client -----------------------------------------------------------------------------------------------------

SOME, SELDOM = [0.0005] * 1000, [0.0005] * 980 + [0.03] * 20
THROUGHPUT = set(THROUGHPUTS)


@pytest.mark.parametrize(
    ("health", "wrong"),
    [
        (ClientHealth(0.3, SOME, SOME), set()),
        (ClientHealth(0.3, SELDOM, SOME), {"p99_itl_ms", "std_itl_ms"}),
        (ClientHealth(0.3, SOME, SELDOM), set()),
        (ClientHealth(0.3, SOME, [0.05] * 9), {"mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "std_ttft_ms"}),
        (ClientHealth(0.95, SOME, SOME), THROUGHPUT | {f"{kind}_tpot_ms" for kind in ("mean", "median", "p99", "std")}),
    ],
)
def test_figures_are_wrong_that_the_clients_lateness_reaches(health: ClientHealth, wrong: set[str]) -> None:
    """Tokens every 100 ms; 400 ms to the first of them, and 1.4 s in all."""
    token_times = [0.4 + index / 10 for index in range(11)]
    run = Run([answered(0.0, 0.0, token_times, token_times[-1], 11) for _ in range(5)], duration=5.0, health=health)
    metrics = ["ttft", "tpot", "itl", "e2el"]
    assert set(wrong_figures(run, figures(run, {}, [99], metrics), [99], metrics)) == wrong


def test_a_rate_is_wrong_when_its_requests_were_late() -> None:
    run = Run([answered(0.0, 1.0, [1.1], 1.2, 1)], duration=2.0, health=ClientHealth(0.1, [], [1.0]))
    assert set(wrong_figures(run, figures(run, {}, [], []), [], [])) == THROUGHPUT


def test_what_was_not_measured_is_not_wrong() -> None:
    run = Run(duration=1.0, health=ClientHealth(0.1, [9.0], [9.0]))
    assert wrong_figures(run, figures(run, {}, [99], ["ttft"]), [99], ["ttft"]) == {}


async def test_a_blocked_loop_is_seen_and_an_idle_one_is_not() -> None:
    monitor = ClientMonitor()
    monitor.start()
    await asyncio.sleep(0.1)
    idle = monitor.stop([])
    monitor.start()
    for _ in range(10):
        until = asyncio.get_running_loop().time() + 0.03
        while asyncio.get_running_loop().time() < until:
            pass
        await asyncio.sleep(0)
    busy = monitor.stop([])
    assert max(busy.loop_lags) > 0.015
    assert busy.cpu_share > 2 * idle.cpu_share


# --- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 90.0])
async def test_the_search_finds_a_capacity(capacity: float) -> None:
    tried = []

    async def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= capacity

    found = await highest(holds, 1.0, 1000.0, 0.05)
    assert found.holds is not None
    assert found.fails is not None
    assert found.holds <= capacity < found.fails <= found.holds * 1.05
    assert len(tried) == len(set(tried)) <= 14


async def test_the_search_ends_at_its_limits() -> None:
    async def answers(value: bool | None) -> Bracket:
        async def holds(rate: float) -> bool | None:
            return value

        return await highest(holds, 4.0, 30.0, 0.1)

    assert await answers(True) == Bracket(30.0, None)
    assert await answers(False) == Bracket(None, 4.0 / 64)
    assert await answers(None) == Bracket(None, None)


# --- flags and plots ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "good", "value", "bad"),
    [
        (flag_types.rates, "1,2.5,inf", [1, 2.5, math.inf], ["0", "-1", "x", "1,", "nan"]),
        (flag_types.integer, "0", 0, ["-1", "1.5", "", "²"]),
        (flag_types.pair, "a=b=c", ("a", "b=c"), ["a", "=b"]),
        (flag_types.header, "X-A=b", ("X-A", "b"), ["a", "a=b\r\nc: d", "a=é"]),
        (flag_types.objective, "ttft:20", ("ttft", 20.0), ["itl:3", "ttft", "ttft:-1", "ttft:inf"]),
        (flag_types.metrics, "ttft,itl", ["ttft", "itl"], ["ttft,x", ""]),
        (flag_types.percentiles, "50,99.9", [50, 99.9], ["101", "-1", "x"]),
        (flag_types.json_object, '{"a": null}', {"a": None}, ["[1]", "x"]),
        (flag_types.number(0, high=1), "1", 1.0, ["1.1", "inf", "nan"]),
    ],
)
def test_values_of_flags(kind: Callable[[str], Any], good: str, value: object, bad: list[str]) -> None:
    assert kind(good) == value
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="not"):
            kind(text)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9)), min_size=1, max_size=30), st.booleans())
def test_every_point_lies_within_the_plot(points: list[tuple[float, float]], log_y: bool) -> None:
    svg = line_plot("a < b", "x", "y", [Line("one", points)], log_y=log_y)
    assert "a &lt; b" in svg
    [path] = [part.split('"')[0] for part in svg.split('points="')[1:]]
    for x, y in (tuple(map(float, pair.split(","))) for pair in path.split()):
        assert 63 <= x <= 641
        assert 15 <= y <= 273
