"""Random adds, aborts and steps on tiny pools."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import Simulation

from configs.errors import ContextLengthExceeded

CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 14),
        "max_model_len": st.integers(2, 60),
        "sliding_window": st.none() | st.integers(1, 12),
        "block_size": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(1, 12),
        "max_num_seqs": st.integers(1, 6),
        "enable_prefix_caching": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "most_in_flight": st.integers(0, 2),
    }
)
ADDS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 30),
        "prefix": st.integers(0, 2),
        "max_tokens": st.none() | st.integers(0, 25),
        "min_tokens": st.integers(0, 1),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "ignore_eos": st.booleans(),
        "priority": st.integers(-1, 1),
        "extra_keys": st.sampled_from([(), ("salt",)]),
        "bad_sequences": st.sampled_from([(), (), ((1000, 1001),)]),
        "patience": st.sampled_from([None, None, 0, 3, 20]),
    }
)
STEPS, ABORTS, FAILURES = st.just("step"), st.integers(0, 30), st.just("fail")
OPERATIONS = st.lists(ADDS | STEPS | STEPS | STEPS | ABORTS | FAILURES, max_size=60)


def prompt_of(length: int, prefix: int) -> list[int]:
    """Prompts of one prefix number agree as far as they go."""
    return [(position // 5 * prefix + position) % 97 for position in range(length)]


@settings(max_examples=400, deadline=None)
@given(config=CONFIGS, operations=OPERATIONS)
def test_random_traffic_ends_every_request_once_with_what_it_gets_alone(config: dict, operations: list) -> None:  # type: ignore[type-arg]
    simulation = Simulation(**config)
    for number, operation in enumerate(operations):
        if operation == "step":
            simulation.step()
        elif operation == "fail":
            running = [request.request_id for request in simulation.scheduler.running]
            simulation.step(failed=dict.fromkeys(running[-1:], "broken"))
        elif isinstance(operation, int):
            simulation.abort(str(operation))
        else:
            add = dict(operation)
            prompt, patience = prompt_of(add.pop("length"), add.pop("prefix")), add.pop("patience")
            deadline = None if patience is None else float(simulation.num_steps + patience)
            if add["max_tokens"] == 0:
                add["min_tokens"] = 0
            try:
                simulation.add(str(number), prompt, deadline=deadline, **add)
            except ContextLengthExceeded:
                num_output = 0 if add["max_tokens"] == 0 else 1
                kv_tokens = simulation.scheduler.kv.max_tokens
                assert len(prompt) > min(config["max_model_len"] - num_output, kv_tokens)
        simulation.scheduler.check_integrity()
    simulation.drain()
    simulation.check_outputs()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("most_in_flight", [0, 1, 2])
def test_there_are_never_more_running_requests_than_tokens_in_the_budget(policy: str, most_in_flight: int) -> None:
    """Requests that wait for the steps under way take nothing of a step's budget, but of the next one's they do."""
    simulation = Simulation(
        num_blocks=14,
        block_size=4,
        max_num_batched_tokens=2,
        max_num_seqs=6,
        scheduling_policy=policy,
        most_in_flight=most_in_flight,
    )
    for number in range(6):
        bad = ((1000, 1001),) if number % 2 else ()
        simulation.add(str(number), prompt_of(1, number), max_tokens=6, ignore_eos=True, bad_sequences=bad)
        simulation.step()
        assert len(simulation.scheduler.running) <= 2
    simulation.drain()
    simulation.check_outputs()


@settings(max_examples=60, deadline=None)
@given(seeds=st.lists(st.integers(0, 200), min_size=12, max_size=40), num_blocks=st.integers(10, 16))
def test_under_pressure_the_first_in_order_ends_first(seeds: list[int], num_blocks: int) -> None:
    """Equal work, first come first served: requests end in the order of arrival."""
    simulation = Simulation(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16)
    for number, seed in enumerate(seeds):
        simulation.add(str(number), prompt_of(6, seed), max_tokens=20, ignore_eos=True)
    simulation.drain()
    simulation.check_outputs()
    assert list(simulation.ended) == sorted(simulation.ended, key=int)
