"""The token that ends a request."""

import pytest

from configs.sampling import SamplingParams
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
