"""Steps that are scheduled before the one under way is booked. That outputs are equal, the property tests show."""

from simulated_engine import EOS, Simulation, next_token

PROMPT = [5, 6, 7]


def test_a_decode_is_scheduled_before_its_token_is_known() -> None:
    simulation = Simulation(num_blocks=10, most_in_flight=1)
    request = simulation.add("a", PROMPT, max_tokens=5, ignore_eos=True)
    simulation.step()
    assert (request.num_output_tokens, request.num_pending_tokens) == (0, 1)
    [share] = simulation.step().scheduled
    assert (share.num_computed_tokens, share.num_scheduled_tokens, share.needs_sample) == (3, 1, True)
    assert (request.num_output_tokens, request.num_pending_tokens) == (1, 1)


def test_a_length_that_is_reached_costs_no_step_too_many() -> None:
    for params, num_blocks in (({"max_tokens": 5}, 10), ({}, 2)):
        simulation = Simulation(num_blocks=num_blocks, most_in_flight=2, block_size=8)
        simulation.add("a", PROMPT, ignore_eos=True, **params)
        simulation.drain()
        simulation.check_outputs()
        assert simulation.num_computed_tokens == simulation.requests["a"].num_tokens - 1


def test_a_stop_is_noticed_one_step_late_and_leaves_nothing_behind() -> None:
    computed = []
    for most_in_flight in (0, 1):
        simulation = Simulation(num_blocks=10, most_in_flight=most_in_flight)
        probe = simulation.add("probe", PROMPT, max_tokens=4, ignore_eos=True)
        simulation.drain()
        simulation = Simulation(num_blocks=10, most_in_flight=most_in_flight)
        simulation.add("a", PROMPT, stop_token_ids=(probe.output_token_ids[2],), ignore_eos=True)
        simulation.drain()
        simulation.check_outputs()
        assert simulation.ended == {"a": "stop"}
        computed.append(simulation.num_computed_tokens)
    assert computed[1] == computed[0] + 1


def test_who_needs_its_newest_token_waits_for_it_and_others_do_not() -> None:
    simulation = Simulation(num_blocks=20, most_in_flight=1)
    simulation.add("held", PROMPT, max_tokens=6, ignore_eos=True, bad_sequences=((1000, 1001),))
    simulation.add("free", PROMPT, max_tokens=6, ignore_eos=True)
    names = [[share.request_id for share in simulation.step().scheduled] for _ in range(5)]
    assert names == [["held", "free"], ["free"], ["held", "free"], ["free"], ["held", "free"]]
    simulation.drain()
    simulation.check_outputs()


def test_an_id_that_comes_back_does_not_get_what_was_under_way_for_the_first() -> None:
    simulation = Simulation(num_blocks=20, most_in_flight=2)
    simulation.add("a", PROMPT, max_tokens=9, ignore_eos=True)
    simulation.step()
    simulation.step()
    simulation.abort("a")
    assert simulation.ended.pop("a") == "abort"
    simulation.add("a", [8, 9], max_tokens=9, eos_token_ids=(EOS,))
    simulation.drain()
    simulation.check_outputs()


def test_a_prompt_without_output_ends_when_its_last_chunk_is_booked() -> None:
    simulation = Simulation(num_blocks=20, most_in_flight=1, max_num_batched_tokens=2)
    simulation.add("a", PROMPT, max_tokens=0)
    simulation.step()
    simulation.step()
    assert not simulation.ended
    assert not simulation.step().scheduled
    assert simulation.ended == {"a": "length"}


def test_the_simulated_engine_can_tell_tokens_apart() -> None:
    assert len({next_token(kv * 32) for kv in range(97)}) == 97
