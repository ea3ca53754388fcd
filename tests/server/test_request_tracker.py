"""What /metrics counts of steps and choices, against the same sums made one token at a time."""

import math
import os
from collections import Counter
from time import monotonic
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from configs.sampling import SamplingParams
from configs.settings import ServerConfig
from engine.bench.stub_core import READY
from engine.messages import NO_STATS, AddRequest, StepStats, TokenOutput
from engine.supervisor import EngineHealth
from scheduler.timeline import Counters, Timeline
from server.metrics.prometheus import EngineMetrics
from server.metrics.records import CURRENT_REQUEST, ChoiceRecord, RequestRecord
from server.metrics.tracker import RequestTracker

TIMES = [f"vllm:{name}_seconds" for name in (
    "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time",
    "request_inference_time", "request_time_per_output_token",
)]  # fmt: skip


def engine(max_model_len: int = 4096) -> Any:
    """What metrics ask of an engine, in which one request runs."""
    info = msgspec.structs.replace(READY, max_model_len=max_model_len, weight_bytes=1000, kv_bytes_per_token=10)
    health = EngineHealth(status="ok")
    running = msgspec.structs.replace(NO_STATS, num_running=1)
    return SimpleNamespace(info=info, stats=lambda: running, health=lambda: health, num_restarts=0, pid=os.getpid())


class Tracked:
    """A tracker to which a test plays the engine, and what /metrics says of it."""

    def __init__(self, **config: Any) -> None:
        self.metrics = EngineMetrics(engine(), ServerConfig(**config), "model", lambda: 0)
        self.tracker = RequestTracker(self.metrics, ServerConfig(), "model")

    def begin(self, name: str, **params: Any) -> ChoiceRecord:
        sampling = SamplingParams(**params)
        token = CURRENT_REQUEST.set(RequestRecord(monotonic(), 0.0, "POST"))
        choice = self.tracker.began(AddRequest(request_id=name, prompt_token_ids=[1] * 7, sampling_params=sampling))
        CURRENT_REQUEST.reset(token)
        return choice

    def step(self, number: int, time: float | None = None, **outputs: int) -> None:
        """New tokens of each choice by its name. Without a time the engine says nothing of itself."""
        new = [TokenOutput(request_id=name, new_token_ids=[5] * count) for name, count in outputs.items()]
        self.tracker.stepped(new, None if time is None else stats(time, number))

    def end(self, choice: ChoiceRecord, reason: str = "length", num_output_tokens: int = 1) -> None:
        self.tracker.ended(choice, reason, num_output_tokens, None)

    def values(self) -> dict[str, float]:
        """By the names of samples, each with its own label's value behind it, if it has one."""
        text = self.metrics.document("")[0].decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        own = [[value for key, value in one.labels.items() if key not in ("model_name", "engine")] for one in samples]
        return {" ".join([one.name, *labels]): one.value for one, labels in zip(samples, own, strict=True)}

    def buckets(self, name: str) -> dict[float, float]:
        beginning = f"{name}_bucket "
        values = self.values()
        return {float(key.removeprefix(beginning)): values[key] for key in values if key.startswith(beginning)}


def stats(time: float, step: int, **fields: Any) -> StepStats:
    of_step = StepStats(time, 1, 0, 1, 0.25, 3, None, Counters(num_steps=step))
    return msgspec.structs.replace(of_step, **fields)


GIVEN = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3), max_size=6)
STEPS = st.lists(st.tuples(GIVEN, st.integers(1, 4), st.sets(st.sampled_from("abcdef"), max_size=2)), max_size=15)
"""What choices get in a step, how often the step repeats, and which end behind it."""


@given(STEPS, st.sets(st.sampled_from("abcdef")))
def test_intervals_between_tokens_are_those_of_each_choice(
    steps: list[tuple[dict[str, int], int, set[str]]], known: set[str]
) -> None:
    """Of choices that have ended here, or are others', nothing is counted."""
    tracked = Tracked()
    running = {name: tracked.begin(name) for name in sorted(known)}
    intervals, last, num_tokens, now = [], dict[str, float](), 0, 0.0
    for number, (step, times, ends) in enumerate(steps, start=1):
        for _ in range(times):
            now += 0.37
            tracked.step(number, now, **step)
            for name in (name for name, count in step.items() if count and name in running):
                num_tokens += step[name]
                intervals += [now - last[name]] if name in last else []
                last[name] = now
        for name in sorted(ends & set(running)):
            choice = running.pop(name)
            tracked.end(choice)
            assert choice.last_token == last.get(name)
    for choice in running.values():
        tracked.end(choice)
    buckets, values = tracked.buckets("vllm:inter_token_latency_seconds"), tracked.values()
    assert buckets == {bound: sum(one <= bound for one in intervals) for bound in buckets}
    assert math.isclose(values["vllm:inter_token_latency_seconds_sum"], sum(intervals), abs_tol=1e-9)
    assert values["vllm:generation_tokens_total"] == num_tokens
    assert values["vllm:time_to_first_token_seconds_count"] == len(last)
    assert values["vllm:prompt_tokens_total"] == 7 * len(known)
    assert values["vllm:request_success_total length"] == len(known)
    assert not [name for name in known if tracked.tracker.owner_of(name) is not None]


def test_tokens_behind_the_end_of_a_choice_leave_nothing() -> None:
    tracked = Tracked()
    tracked.end(tracked.begin("a"), "stop", 3)
    tracked.step(1, 1.0, a=1)
    assert tracked.values()["vllm:generation_tokens_total"] == 0


def test_an_id_that_two_choices_have_had_counts_for_both() -> None:
    """The first one's core has ended, which its reader learns behind the beginning of the second."""
    tracked = Tracked()
    first = tracked.begin("a")
    tracked.step(1, 1.0, a=1)
    second = tracked.begin("a")
    tracked.end(first, "error")
    tracked.step(2, 2.0, a=1)
    tracked.step(3, 3.0, a=1)
    tracked.end(second, num_output_tokens=2)
    assert (first.last_token, second.first_token, second.last_token) == (1.0, 2.0, 3.0)
    assert tracked.values()["vllm:inter_token_latency_seconds_sum"] == 1.0
    assert tracked.tracker.owner_of("a") is None


def test_a_core_that_tells_nothing_of_itself_has_intervals_too() -> None:
    tracked = Tracked()
    tracked.begin("a")
    for number in range(4):
        tracked.step(number, a=1)
    values = tracked.values()
    assert values["vllm:inter_token_latency_seconds_bucket 0.01"] == 3
    assert values["octavo:step_seconds_count"] == 0


def test_a_step_counts_once_though_messages_repeat_it() -> None:
    tracked = Tracked(memory_bandwidth=1e-6)  # a kilobyte per second
    for time, step in ((1.0, 1), (1.0, 1), (2.0, 2), (2.0, 3)):
        tracked.tracker.stepped([], stats(time, step))
    tracked.tracker.stepped([], stats(3.0, 3, step_tokens=0))
    values = tracked.values()
    assert (values["octavo:step_seconds_sum"], values["octavo:step_seconds_bucket 0.5"]) == (0.5, 2)
    assert values["vllm:iteration_tokens_total_sum"] == 6
    assert values["octavo:step_bytes_total"] == 2 * (1000 + 10 * 16)
    assert values["octavo:memory_bandwidth_fraction"] == pytest.approx(1160 / 0.25 / 1000)


def ended(reason: str, timeline: Timeline, *, tokens: int, **params: Any) -> dict[str, float]:
    """Of one choice with its first token at 11 and its last one at 13.5."""
    tracked = Tracked()
    choice = tracked.begin("a", **params)
    for number, time in enumerate((11.0, 12.0, 13.5)[:tokens]):
        output = TokenOutput(
            request_id="a", new_token_ids=[5], num_cached_tokens=4, timeline=timeline if not number else None
        )
        counters = Counters(num_steps=7 + number, num_step_requests=20 + 3 * number)
        tracked.tracker.stepped([output], stats(time, 7 + number, counters=counters))
    tracked.end(choice, reason, tokens)
    return tracked.values()


def test_a_choice_is_counted_by_its_timeline() -> None:
    timeline = Timeline(queued=5.0, admitted=9.0, first_token=11.0, num_preemptions=2)
    timeline.note_first_token(11.0, Counters(num_steps=7, num_step_requests=20))
    values = ended("stop", timeline, tokens=3, max_tokens=30)
    assert [values[f"{name}_sum"] for name in TIMES[1:]] == [4.0, 2.0, 2.5, 4.5, 1.25]
    expected = {"prompt_tokens": 7, "prefill_kv_computed_tokens": 3, "generation_tokens": 3, "num_preemptions": 2}
    expected["params_max_tokens"] = 30
    assert {name: values[f"vllm:request_{name}_sum"] for name in expected} == expected
    assert timeline.ended is not None
    assert (timeline.num_decode_steps, timeline.mean_step_requests) == (2, 3.0), "the core was not asked how it went on"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_did_not_succeed_has_no_times(reason: str) -> None:
    values = ended(reason, Timeline(queued=5.0, admitted=9.0), tokens=2)
    assert values[f"vllm:request_success_total {reason}"] == 1
    assert {values[f"{name}_count"] for name in TIMES} == {0}
    assert values["vllm:request_prompt_tokens_sum"] == values["vllm:prompt_tokens_total"] == 7
    assert values["vllm:request_generation_tokens_sum"] == values["vllm:generation_tokens_total"] == 2


def test_whoever_ends_in_the_queue_has_waited_and_nothing_else() -> None:
    values = ended("timeout", Timeline(queued=5.0), tokens=0)
    assert {values[f"vllm:request_{name}_seconds_sum"] for name in ("prefill_time", "decode_time")} == {0}
    assert values["vllm:request_time_per_output_token_seconds_sum"] == 0
    finished = Counter({key: value for key, value in values.items() if "request_success" in key and value})
    assert finished == {"vllm:request_success_total timeout": 1}
    assert values["vllm:request_queue_time_seconds_count"] == 1
    assert values["vllm:time_to_first_token_seconds_count"] == 0


def test_first_tokens_are_timed_from_the_request() -> None:
    tracked = Tracked()
    tracked.begin("a").received -= 3.0
    tracked.step(1, a=1)
    assert 3.0 <= tracked.values()["vllm:time_to_first_token_seconds_sum"] < 3.5


@pytest.mark.parametrize(
    ("context", "last"), [(4096, [1000, 2000]), (5000, [2000, 5000]), (1, [1])], ids=lambda one: str(one)
)
def test_buckets_of_tokens_end_with_the_context(context: int, last: list[int]) -> None:
    text = EngineMetrics(engine(context), ServerConfig(), "model", lambda: 0).document("")[0].decode()
    [family] = [one for one in text_string_to_metric_families(text) if one.name == "vllm:request_prompt_tokens"]
    bounds = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
    assert bounds[-1 - len(last) :] == [*last, math.inf]
