"""What one step holds: order, budget, admission, preemption, endings."""

import pytest
from simulated_engine import EOS, Simulation

from configs.errors import ContextLengthExceeded, InvalidRequest, SettingsError
from configs.settings import SchedulerConfig
from scheduler.output import SchedulerOutput
from scheduler.request import RequestStatus
from scheduler.scheduler import Scheduler


def shares(output: SchedulerOutput) -> dict[str, int]:
    return {row.request_id: row.num_scheduled_tokens for row in output.scheduled}


def test_running_requests_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    simulation = Simulation(num_blocks=100, max_num_batched_tokens=32)
    simulation.add("a", range(1, 11), ignore_eos=True)
    assert shares(simulation.step()) == {"a": 10}
    simulation.add("b", range(1, 60), ignore_eos=True)
    simulation.add("c", range(1, 5), ignore_eos=True)
    assert shares(simulation.step()) == {"a": 1, "b": 31}
    assert shares(simulation.step()) == {"a": 1, "b": 28, "c": 3}
    assert shares(simulation.step()) == {"a": 1, "b": 1, "c": 1}


def test_no_more_requests_run_than_max_num_seqs() -> None:
    simulation = Simulation(num_blocks=100, max_num_seqs=2)
    for name in "abc":
        simulation.add(name, range(1, 5), max_tokens=3, ignore_eos=True)
    assert [list(shares(simulation.step())) for _ in range(4)] == [["a", "b"], ["a", "b"], ["a", "b"], ["c"]]


def test_a_request_is_sent_whole_once_and_then_by_its_differences() -> None:
    simulation = Simulation(num_blocks=100, block_size=4)
    request = simulation.add("a", range(1, 8), ignore_eos=True)
    first, second, third = simulation.step(), simulation.step(), simulation.step()
    assert first.new_requests[0].token_ids == list(range(1, 8))
    assert first.new_requests[0].stop_token_ids == frozenset()
    assert [row.new_block_ids for output in (first, second, third) for row in output.scheduled] == [[1, 2], [], [3]]
    assert not second.new_requests
    assert request.prompt_token_ids == list(range(1, 8))
    assert repr(request) == "Request('a', RUNNING, prompt=7, output=3, computed=9)"


def test_the_sampler_learns_seed_and_stop_ids() -> None:
    simulation = Simulation(num_blocks=10)
    simulation.add("a", [1], stop_token_ids=(5,)).seed = 42
    new = simulation.step().new_requests[0]
    assert (new.seed, new.stop_token_ids) == (42, frozenset({EOS, 5}))


def test_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    simulation = Simulation(num_blocks=9, block_size=4, max_num_batched_tokens=8)
    simulation.add("a", range(1, 9), max_tokens=7, ignore_eos=True)
    simulation.step()
    simulation.add("b", range(11, 34))  # 6 blocks; 6 are free, but one is for "a" to grow into
    while simulation.scheduler.num_running:
        assert list(shares(simulation.step())) == ["a"]
    assert list(shares(simulation.step())) == ["b"]


def test_the_youngest_request_makes_room_and_nobody_is_admitted_in_that_step() -> None:
    simulation = Simulation(num_blocks=7, block_size=4)
    for name in "abc":
        simulation.add(name, [ord(name), *range(1, 7)], max_tokens=16, ignore_eos=True)
    assert list(shares(simulation.step())) == ["a", "b"]  # each with a block to grow into; "c" must wait
    simulation.abort("c")
    while simulation.num_preemptions == 0:
        output = simulation.step()
    assert output.dropped_request_ids == ["b"]
    assert simulation.requests["b"].status is RequestStatus.WAITING
    assert simulation.requests["b"].num_output_tokens > 0
    simulation.add("d", [1], max_tokens=1)
    assert "d" not in shares(simulation.step())  # "b" is older
    simulation.drain()
    simulation.check_outputs()


def test_a_request_short_of_blocks_for_itself_waits_in_place() -> None:
    simulation = Simulation(num_blocks=7, block_size=4)
    simulation.add("a", range(1, 13), max_tokens=3, ignore_eos=True)
    simulation.add("b", range(21, 29), max_tokens=9, ignore_eos=True)
    assert shares(simulation.step()) == {"a": 12, "b": 8}
    simulation.add("c", [1], max_tokens=1, ignore_eos=True)
    assert shares(simulation.step()) == {"a": 1}  # "a" took the last block, which "b" and "c" wait for
    assert shares(simulation.step()) == {"a": 1}
    assert shares(simulation.step()) == {"b": 1, "c": 1}
    simulation.drain()
    simulation.check_outputs()
    assert simulation.num_preemptions == 0


def test_nobody_slips_in_while_a_long_prompt_waits_for_blocks() -> None:
    simulation = Simulation(num_blocks=33, block_size=1, max_num_batched_tokens=11)
    simulation.add("a", [1], max_tokens=3, ignore_eos=True)
    simulation.add("b", range(21, 51), max_tokens=1)
    simulation.step()
    simulation.add("c", [2], max_tokens=1)
    assert shares(simulation.step()) == {"a": 1, "b": 10}
    assert shares(simulation.step()) == {"a": 1}  # 9 blocks are free, but the next chunk of "b" needs 10
    assert shares(simulation.step()) == {"b": 10, "c": 1}


def test_what_a_preemption_frees_is_not_taken_by_a_newcomer() -> None:
    simulation = Simulation(num_blocks=7, block_size=4, scheduling_policy="priority")
    simulation.add("low", range(1, 8), max_tokens=16, ignore_eos=True, priority=1)
    simulation.add("high", range(2, 9), max_tokens=16, ignore_eos=True, priority=0)
    while simulation.scheduler.num_used_blocks < 6:
        simulation.step()
    simulation.add("best", [1], max_tokens=2, ignore_eos=True, priority=-1)
    while simulation.num_preemptions == 0:
        output = simulation.step()
    assert list(shares(output)) == ["high"]
    assert list(shares(simulation.step())) == ["high", "best"]
    simulation.drain()
    simulation.check_outputs()


def test_cached_tokens_are_those_of_the_prompt_at_its_first_admission() -> None:
    simulation = Simulation(num_blocks=9, block_size=4)
    first = simulation.add("a", range(1, 10), max_tokens=20, ignore_eos=True)
    second = simulation.add("b", range(11, 20), max_tokens=20, ignore_eos=True)
    simulation.drain()
    assert second.timeline.num_preemptions > 0
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
    third = simulation.add("c", range(11, 20), max_tokens=1)
    simulation.drain()
    assert third.num_cached_tokens == 8


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", ["x", "y", "z"]), ("priority", ["y", "z", "x"])])
def test_the_policy_orders_the_queue(policy: str, expected: list[str]) -> None:
    simulation = Simulation(num_blocks=50, max_num_seqs=1, scheduling_policy=policy)
    for name, priority in (("x", 5), ("y", -1), ("z", -1)):
        simulation.add(name, [1, 2], priority=priority, max_tokens=1)
    simulation.drain()
    assert list(simulation.ended) == expected


def test_the_lowest_priority_makes_room() -> None:
    simulation = Simulation(num_blocks=7, block_size=4, scheduling_policy="priority")
    simulation.add("low", range(1, 8), max_tokens=16, ignore_eos=True, priority=1)
    simulation.step()
    simulation.add("high", range(2, 9), max_tokens=16, ignore_eos=True, priority=0)
    while simulation.num_preemptions == 0:
        output = simulation.step()
    assert output.dropped_request_ids == ["low"]
    simulation.drain()
    assert list(simulation.ended) == ["high", "low"]
    simulation.check_outputs()


def test_a_better_prompt_does_not_stop_others_from_decoding() -> None:
    simulation = Simulation(num_blocks=100, max_num_batched_tokens=16, scheduling_policy="priority")
    for name in "ab":
        simulation.add(name, [1, 2], ignore_eos=True, priority=1)
    simulation.step()
    simulation.add("better", range(1, 60), ignore_eos=True)
    simulation.step()
    assert shares(simulation.step()) == {"better": 14, "a": 1, "b": 1}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_a_request_can_be_aborted_in_any_state(num_steps: int) -> None:
    simulation = Simulation(num_blocks=9, block_size=4, max_num_batched_tokens=8)
    request = simulation.add("a", range(1, 21), ignore_eos=True)
    for _ in range(num_steps):
        simulation.step()
    simulation.abort("a", "a", "unknown")
    assert request.finish_reason == "abort"
    assert not simulation.scheduler.has_work
    assert simulation.scheduler.num_used_blocks == 0
    assert simulation.scheduler.schedule(0.0).dropped_request_ids == (["a"] if num_steps else [])
    assert simulation.scheduler.schedule(0.0).dropped_request_ids == []


def test_an_abort_while_the_engine_computes_leaves_the_step_sound() -> None:
    simulation = Simulation(num_blocks=20)
    simulation.add("a", range(1, 21), max_tokens=5)
    simulation.add("b", range(1, 31), max_tokens=5)
    output = simulation.scheduler.schedule(0.0)
    sampled = simulation.execute(output)
    simulation.abort("a")
    simulation.scheduler.check_integrity()
    simulation.book(output, sampled)
    assert simulation.requests["a"].num_output_tokens == 0
    simulation.drain()
    simulation.check_outputs()


def test_a_failed_request_ends_with_its_reason_and_leaves_nothing_in_the_cache() -> None:
    simulation = Simulation(num_blocks=20, block_size=4)
    request = simulation.add("a", range(1, 21), max_tokens=9)
    simulation.add("b", range(50, 60), max_tokens=9)
    simulation.step()
    simulation.step(failed={"a": "logits are not numbers"})
    assert (request.finish_reason, request.error) == ("error", "logits are not numbers")
    again = simulation.add("again", range(1, 21), max_tokens=9)
    simulation.drain()
    simulation.check_outputs()
    assert again.num_cached_tokens == 0


def test_a_complete_output_ends_with_its_token_whatever_the_length() -> None:
    simulation = Simulation(num_blocks=20, block_size=4)
    requests = [simulation.add(name, range(1, 9), max_tokens=1 if name == "a" else 5) for name in "abc"]
    scheduler = simulation.scheduler
    output = scheduler.schedule(0.0)
    updates = scheduler.update_from_output(output, dict.fromkeys("abc", 7), {}, {"a", "b"})
    assert [(request.request_id, new) for request, new in updates] == [("a", [7]), ("b", [7]), ("c", [7])]
    assert [request.finish_reason for request in requests] == ["complete", "complete", None]
    scheduler.check_integrity()
    assert list(scheduler.requests) == ["c"]


def test_requests_that_can_never_run_are_refused() -> None:
    simulation = Simulation(num_blocks=100, max_model_len=50)
    with pytest.raises(InvalidRequest, match="empty") as empty:
        simulation.add("a", [])
    assert empty.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded, match=r"50 tokens.*context holds at most 50") as too_long:
        simulation.add("a", range(50))
    assert (too_long.value.status, too_long.value.code) == (400, "context_length_exceeded")
    simulation.add("a", range(49), max_tokens=None)
    with pytest.raises(InvalidRequest, match="in use"):
        simulation.add("a", [1])
    simulation.drain()
    assert simulation.ended == {"a": "length"}
    assert simulation.requests["a"].num_output_tokens == 1


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(SettingsError, match="at least one block"):
        Scheduler(SchedulerConfig(), num_blocks=1, max_model_len=10)


def test_a_sliding_window_lets_a_request_outgrow_the_pool() -> None:
    simulation = Simulation(num_blocks=9, block_size=4, sliding_window=10)
    simulation.add("a", [index % 90 for index in range(300)], max_tokens=300, ignore_eos=True)
    simulation.add("b", range(1, 41), max_tokens=50, ignore_eos=True)
    simulation.drain()
    simulation.check_outputs()
    assert simulation.requests["a"].num_tokens == 600


def test_times_are_the_callers() -> None:
    simulation = Simulation(num_blocks=20, max_num_seqs=1)
    first = simulation.add("a", [1], max_tokens=3, ignore_eos=True)
    second = simulation.add("b", [1], max_tokens=1)
    simulation.drain()
    assert (first.timeline.admitted, second.timeline.admitted) == (0.0, 3.0)
