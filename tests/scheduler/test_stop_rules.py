"""The token that ends a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import InvalidRequest
from configs.sampling import RepetitionDetection, SamplingParams
from scheduler.request import Request
from scheduler.stop import stop_cause

EOS, STOP = 1, 2


def cause(output: list[int], max_total_tokens: int = 100, **params: object) -> tuple[str, int | None] | None:
    sampling_params = SamplingParams(stop_token_ids=(STOP,), **params)  # type: ignore[arg-type]
    request = Request("r", [7, 8, 9], sampling_params, arrival_time=0.0, eos_token_ids=(EOS, 3))
    request.token_ids += output
    return stop_cause(request, max_total_tokens)


def test_ordinary_tokens_go_on() -> None:
    assert cause([5]) is None


@pytest.mark.parametrize("eos", [EOS, 3])
def test_every_end_of_sequence_id_stops(eos: int) -> None:
    assert cause([5, eos]) == ("stop", None)
    assert cause([5, eos], ignore_eos=True) is None


def test_stop_ids_are_named() -> None:
    assert cause([5, STOP]) == ("stop", STOP)
    assert cause([5, STOP], ignore_eos=True) == ("stop", STOP)


def test_stop_ids_wait_for_min_tokens() -> None:
    assert cause([STOP], min_tokens=2) is None
    assert cause([5, EOS], min_tokens=2) is None
    assert cause([5, 5, EOS], min_tokens=2) == ("stop", None)


def test_lengths() -> None:
    assert cause([5] * 16) == ("length", None)
    assert cause([5] * 16, max_tokens=None) is None
    assert cause([5, 5], 5) == ("length", None)
    assert cause([5], 5) is None


def test_a_stop_id_wins_over_the_length() -> None:
    assert cause([5, EOS], 5) == ("stop", None)
    assert cause([5, STOP], max_tokens=2) == ("stop", STOP)


def test_the_last_allowed_token_ends_even_below_min_tokens() -> None:
    assert cause([5, EOS], max_tokens=2, min_tokens=2) == ("length", None)


def test_an_id_that_is_both_counts_as_end_of_sequence() -> None:
    request = Request("r", [7], SamplingParams(stop_token_ids=(EOS,)), arrival_time=0.0, eos_token_ids=(EOS,))
    request.token_ids.append(EOS)
    assert stop_cause(request, 9) == ("stop", None)


def repeats(output: list[int], detection: RepetitionDetection) -> bool:
    """By the definition, pattern by pattern."""
    for size in range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1):
        tail = output[len(output) - size * detection.min_count :]
        if size * detection.min_count <= len(output) and tail == tail[:size] * detection.min_count:
            return True
    return False


@given(
    output=st.lists(st.integers(10, 12), min_size=1, max_size=14),
    sizes=st.lists(st.integers(0, 5), min_size=2, max_size=2).map(sorted),
    count=st.integers(2, 4),
)
def test_repetition_ends_a_request(output: list[int], sizes: list[int], count: int) -> None:
    detection = RepetitionDetection(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
    expected = ("repetition", None) if repeats(output, detection) else None
    assert cause(output, max_tokens=50, repetition_detection=detection) == expected


@pytest.mark.parametrize(
    "fields",
    [(-1, 0, 2), (1, 2, 2), (2, 1, 1), (2000, 1, 2), (2, 1, 2000)],
)
def test_repetitions_that_cannot_be(fields: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match="repetition_detection"):
        SamplingParams(repetition_detection=RepetitionDetection(*fields))
