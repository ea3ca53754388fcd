"""Requests whose time is over end as they are. The simulation's clock counts steps."""

import pytest
from simulated_engine import Simulation

PROMPT = [5, 6, 7]


@pytest.mark.parametrize("most_in_flight", [0, 1, 2])
def test_a_running_request_ends_with_what_it_has(most_in_flight: int) -> None:
    simulation = Simulation(num_blocks=20, most_in_flight=most_in_flight)
    simulation.add("late", PROMPT, max_tokens=50, ignore_eos=True, deadline=10.0)
    simulation.add("other", PROMPT, max_tokens=30, ignore_eos=True)
    simulation.drain()
    simulation.check_outputs()
    assert simulation.ended == {"late": "timeout", "other": "length"}
    assert simulation.requests["late"].num_output_tokens == 10


def test_nothing_is_computed_for_who_waited_too_long() -> None:
    simulation = Simulation(num_blocks=20, max_num_seqs=1)
    simulation.add("long", PROMPT, max_tokens=20, ignore_eos=True)
    simulation.add("late", [8] * 9, max_tokens=5, deadline=12.0)
    simulation.drain()
    simulation.check_outputs()
    assert simulation.ended == {"late": "timeout", "long": "length"}
    assert simulation.num_computed_tokens == len(PROMPT) + 19
    assert simulation.requests["late"].timeline.admitted is None


def test_the_deadline_itself_is_too_late() -> None:
    simulation = Simulation(num_blocks=20)
    request = simulation.add("a", PROMPT, deadline=5.0)
    assert simulation.scheduler.end_expired(4.999) == []
    assert simulation.scheduler.end_expired(5.0) == [request]
    assert simulation.scheduler.end_expired(6.0) == []


def test_whoever_is_latest_ends_first() -> None:
    simulation = Simulation(num_blocks=50)
    for number, deadline in enumerate([9.0, 3.0, 6.0, 3.0]):
        simulation.add(str(number), PROMPT, deadline=deadline)
    ended = [request.request_id for request in simulation.scheduler.end_expired(7.0)]
    assert ended == ["1", "3", "2"]
    simulation.scheduler.check_integrity()


def test_an_id_that_comes_back_has_its_own_deadline() -> None:
    simulation = Simulation(num_blocks=50)
    simulation.add("a", PROMPT, deadline=3.0)
    simulation.abort("a")
    simulation.ended.clear()
    simulation.add("a", PROMPT, max_tokens=8, ignore_eos=True, deadline=100.0)
    simulation.drain()
    assert simulation.ended == {"a": "length"}
