"""What is counted, against the same sums made one token at a time."""

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.sampling import SamplingParams
from engine.bench.stub_core import READY
from engine.messages import AddRequest, StepStats, TokenOutput
from scheduler.timeline import Counters, Timeline
from server.metrics.figures import Figures
from server.metrics.histogram import FIRST_TOKEN_BUCKETS, STEP_BUCKETS, TOKEN_LATENCY_BUCKETS, Histogram, token_buckets
from server.metrics.records import Choice
from server.metrics.watcher import Watcher

INFO = msgspec.structs.replace(READY, max_model_len=4096, weight_bytes=1000, kv_bytes_per_token=10)


@given(st.lists(st.tuples(st.floats(0, 200), st.integers(1, 5))))
def test_a_histogram_counts_what_is_not_above_each_bound(values: list[tuple[float, int]]) -> None:
    histogram = Histogram(TOKEN_LATENCY_BUCKETS)
    for value, times in values:
        histogram.observe(value, times)
    every = [value for value, times in values for _ in range(times)]
    expected = [(str(float(bound)), sum(value <= bound for value in every)) for bound in TOKEN_LATENCY_BUCKETS]
    assert histogram.buckets() == [*expected, ("+Inf", len(every))]
    assert math.isclose(histogram.sum, sum(every), abs_tol=1e-9)


def test_buckets_of_tokens_end_with_the_context() -> None:
    assert token_buckets(4096) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert token_buckets(5000)[-2:] == (2000, 5000)
    assert token_buckets(1) == (1,)


def stats(time: float, step: int, **fields: object) -> StepStats:
    of_step = StepStats(time, 1, 0, 1, 0.25, 3, None, Counters(num_steps=step))
    return msgspec.structs.replace(of_step, **fields)


def begin(watcher: Watcher, name: str, **params: object) -> Choice:
    sampling = SamplingParams(**params)
    return watcher.began(AddRequest(request_id=name, prompt_token_ids=[1] * 7, sampling_params=sampling))


GIVEN = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3), max_size=6)
STEPS = st.lists(st.tuples(GIVEN, st.integers(1, 4), st.sets(st.sampled_from("abcdef"), max_size=2)), max_size=15)
"""What choices get in a step, how often the step repeats, and which end behind it."""


@given(STEPS, st.sets(st.sampled_from("abcdef")))
def test_intervals_between_tokens_are_those_of_each_choice(
    steps: list[tuple[dict[str, int], int, set[str]]], known: set[str]
) -> None:
    """Of choices that have ended here, or are others', nothing is counted."""
    watcher = Watcher(Figures(INFO))
    expected = Histogram(TOKEN_LATENCY_BUCKETS)
    running, last, num_tokens, now = set(known), dict[str, float](), 0, 0.0
    for name in sorted(known):
        begin(watcher, name)
    for number, (step, times, ends) in enumerate(steps, start=1):
        for _ in range(times):
            now += 0.37
            outputs = [TokenOutput(request_id=name, new_token_ids=[5] * count) for name, count in step.items()]
            watcher.stepped(outputs, stats(now, number))
            for name in (name for name, count in step.items() if count and name in running):
                num_tokens += step[name]
                if name in last:
                    expected.observe(now - last[name])
                last[name] = now
        for name in sorted(ends & running):
            choice = watcher._choices[name]
            watcher.ended(choice, "length", 1, None)
            assert choice.last_token == last.get(name)
            running.remove(name)
    figures = watcher.figures
    assert figures.inter_token.buckets() == expected.buckets()
    assert math.isclose(figures.inter_token.sum, expected.sum, abs_tol=1e-9)
    assert figures.num_output_tokens == num_tokens
    assert figures.first_token.buckets()[-1] == ("+Inf", len(last))
    for name in sorted(running):
        watcher.ended(watcher._choices[name], "length", 1, None)
    assert figures.num_prompt_tokens == 7 * len(known)
    assert sum(figures.finished.values()) == len(known)
    assert not watcher._choices
    assert not watcher._last_token


def test_tokens_behind_the_end_of_a_choice_leave_nothing() -> None:
    watcher = Watcher(Figures(INFO))
    watcher.ended(begin(watcher, "a"), "stop", 3, None)
    watcher.stepped([TokenOutput(request_id="a", new_token_ids=[5])], stats(1.0, 1))
    assert not watcher._last_token
    assert watcher.figures.num_output_tokens == 0


def test_an_id_that_two_choices_have_had_counts_for_both() -> None:
    """The first one's core has ended, which its reader learns behind the beginning of the second."""
    watcher = Watcher(Figures(INFO))
    first = begin(watcher, "a")
    watcher.stepped([TokenOutput(request_id="a", new_token_ids=[5])], stats(1.0, 1))
    second = begin(watcher, "a")
    watcher.ended(first, "error", 1, None)
    for number in range(2, 4):
        watcher.stepped([TokenOutput(request_id="a", new_token_ids=[5])], stats(float(number), number))
    watcher.ended(second, "length", 2, None)
    assert (first.last_token, second.first_token, second.last_token) == (None, 2.0, 3.0)
    assert watcher.figures.inter_token.sum == 1.0
    assert not watcher._choices
    assert not watcher._last_token


def test_a_core_that_tells_nothing_of_itself_has_intervals_too() -> None:
    watcher = Watcher(Figures(INFO))
    begin(watcher, "a")
    for _ in range(4):
        watcher.stepped([TokenOutput(request_id="a", new_token_ids=[5])], None)
    assert watcher.figures.inter_token.buckets()[0] == ("0.01", 3)
    assert watcher.figures.step_seconds.buckets()[-1] == ("+Inf", 0)


def test_a_step_counts_once_though_messages_repeat_it() -> None:
    watcher = Watcher(Figures(INFO))
    for time, step in ((1.0, 1), (1.0, 1), (2.0, 2), (2.0, 3)):
        watcher.stepped([], stats(time, step))
    watcher.stepped([], stats(3.0, 3, step_tokens=0))
    figures = watcher.figures
    assert (figures.step_seconds.sum, figures.step_seconds.buckets()[STEP_BUCKETS.index(0.5)]) == (0.5, ("0.5", 2))
    assert figures.step_tokens.sum == 6
    assert figures.step_bytes == 2 * (1000 + 10 * 16)
    assert figures.bytes_per_second == pytest.approx(1160 / 0.25)


def ended(reason: str, timeline: Timeline, *, tokens: int, **params: object) -> Figures:
    """Of one choice with its first token at 11 and its last one at 13.5."""
    watcher = Watcher(Figures(INFO))
    choice = begin(watcher, "a", **params)
    for number, time in enumerate((11.0, 12.0, 13.5)[:tokens]):
        output = TokenOutput(
            request_id="a", new_token_ids=[5], num_cached_tokens=4, timeline=timeline if not number else None
        )
        watcher.stepped(
            [output],
            stats(time, 7 + number, counters=Counters(num_steps=7 + number, num_step_requests=20 + 3 * number)),
        )
    watcher.ended(choice, reason, tokens, None)
    return watcher.figures


def test_a_choice_is_counted_by_its_timeline() -> None:
    timeline = Timeline(queued=5.0, admitted=9.0, first_token=11.0, num_preemptions=2)
    timeline.note_first_token(11.0, Counters(num_steps=7, num_step_requests=20))
    figures = ended("stop", timeline, tokens=3, max_tokens=30)
    sums = {
        name: getattr(figures, name).sum for name in ("queue", "prefill", "decode", "inference", "per_output_token")
    }
    assert sums == {"queue": 4.0, "prefill": 2.0, "decode": 2.5, "inference": 4.5, "per_output_token": 1.25}
    assert (figures.prompt_tokens.sum, figures.computed_tokens.sum, figures.output_tokens.sum) == (7, 3, 3)
    assert (figures.preemptions.sum, figures.max_tokens.sum) == (2, 30)
    assert timeline.ended is not None
    assert (timeline.num_decode_steps, timeline.mean_step_requests) == (2, 3.0), "the core was not asked how it went on"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_did_not_succeed_has_no_times(reason: str) -> None:
    figures = ended(reason, Timeline(queued=5.0, admitted=9.0), tokens=2)
    assert figures.finished[reason] == 1
    for name in ("e2e", "queue", "prefill", "decode", "inference", "per_output_token"):
        assert getattr(figures, name).buckets()[-1] == ("+Inf", 0)
    assert figures.prompt_tokens.sum == figures.num_prompt_tokens == 7
    assert figures.output_tokens.sum == figures.num_output_tokens == 2


def test_whoever_ends_in_the_queue_has_waited_and_nothing_else() -> None:
    figures = ended("timeout", Timeline(queued=5.0), tokens=0)
    counts = {name: getattr(figures, name).sum for name in ("prefill", "decode", "per_output_token")}
    assert counts == {"prefill": 0, "decode": 0, "per_output_token": 0}
    assert figures.finished == Counter(figures.finished) | Counter(timeout=1)
    assert figures.queue.buckets()[-1] == ("+Inf", 1)
    assert figures.first_token.buckets()[-1] == ("+Inf", 0)


def test_first_tokens_are_timed_from_the_request() -> None:
    assert list(FIRST_TOKEN_BUCKETS) == sorted(FIRST_TOKEN_BUCKETS)
    watcher = Watcher(Figures(INFO))
    begin(watcher, "a")
    watcher._choices["a"].received -= 3.0
    watcher.stepped([TokenOutput(request_id="a", new_token_ids=[5])], None)
    assert 3.0 <= watcher.figures.first_token.sum < 3.5
