"""A request's tokens do not depend on batch mates, chunking, caching, preemption or cancellations of others."""

import random
from typing import Any

import pytest
from simulated_engine import EOS, Simulation

from configs.errors import ContextLengthExceeded


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1, 97) for _ in range(length)]


@pytest.mark.parametrize("budget", [1, 7, 16, 17, 64, 512])
@pytest.mark.parametrize("block_size", [1, 16])
def test_chunk_and_block_sizes_do_not_matter(budget: int, block_size: int) -> None:
    simulation = Simulation(num_blocks=2000, block_size=block_size, max_num_batched_tokens=budget, check=False)
    for index, length in enumerate((300, 64, 65, 1, 15, 16, 17)):
        simulation.add(str(index), prompt_of(length, index), max_tokens=20)
    simulation.drain()
    simulation.check_outputs()


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_prompts_of_exactly_so_many_chunks_produce_a_token(num_chunks: int) -> None:
    simulation = Simulation(num_blocks=100, max_num_batched_tokens=64)
    simulation.add("a", prompt_of(64 * num_chunks), max_tokens=12, ignore_eos=True)
    for _ in range(num_chunks):
        assert simulation.requests["a"].num_output_tokens == 0
        simulation.step()
    assert simulation.requests["a"].num_output_tokens == 1
    simulation.drain()
    assert simulation.ended == {"a": "length"}


def test_an_impossible_prompt_is_refused_and_blocks_nobody() -> None:
    simulation = Simulation(num_blocks=17, max_model_len=2048)  # 256 tokens of KV
    with pytest.raises(ContextLengthExceeded, match=r"1000 tokens.*KV cache holds at most 257"):
        simulation.add("huge", prompt_of(1000))
    for index in range(10):
        simulation.add(str(index), prompt_of(20, index), max_tokens=10)
    simulation.add("grows", prompt_of(200), max_tokens=500, ignore_eos=True)
    simulation.drain()
    simulation.check_outputs()
    assert simulation.ended["grows"] == "length"
    assert simulation.requests["grows"].num_tokens == 257  # the last token needs no KV


def test_running_out_of_blocks_while_decoding_fails_nobody() -> None:
    simulation = Simulation(num_blocks=17)
    for index in range(8):
        simulation.add(str(index), prompt_of(16, index), max_tokens=96, ignore_eos=True)
    simulation.drain()
    simulation.check_outputs()
    assert simulation.num_preemptions > 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preemption_neither_loses_nor_repeats_tokens(enable_prefix_caching: bool, policy: str) -> None:
    simulation = Simulation(
        num_blocks=17,
        block_size=16,
        max_num_batched_tokens=32,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=policy,
    )
    for index in range(12):
        simulation.add(str(index), prompt_of(5 + index, index), max_tokens=200, ignore_eos=True, priority=-index)
    simulation.drain()
    simulation.check_outputs()
    assert simulation.num_preemptions > 0
    assert all(request.num_output_tokens == 200 for request in simulation.requests.values())


def test_preempted_requests_come_back_through_the_prefix_cache() -> None:
    num_computed_tokens = {}
    for enable_prefix_caching in (False, True):
        simulation = Simulation(
            num_blocks=17,
            block_size=4,
            max_num_batched_tokens=32,
            enable_prefix_caching=enable_prefix_caching,
            check=False,
        )
        for index in range(200):  # no two start alike: only a request's own blocks can be found again
            simulation.add(str(index), [index % 97, index // 97, *prompt_of(index % 9, index)], max_tokens=30)
        simulation.drain()
        simulation.check_outputs()
        assert simulation.num_preemptions > 0
        num_computed_tokens[enable_prefix_caching] = simulation.num_computed_tokens
    assert num_computed_tokens[True] < num_computed_tokens[False]


def test_partly_shared_prompts_survive_preemption() -> None:
    simulation = Simulation(num_blocks=17, block_size=4, max_num_batched_tokens=32, check=False)
    shared = [prompt_of(12, seed) for seed in range(4)]
    for index in range(200):
        simulation.add(str(index), shared[index % 4] + prompt_of(index % 9, index), max_tokens=30)
    simulation.drain()
    simulation.check_outputs()
    assert simulation.num_preemptions > 0


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_sent_again_recomputes_its_last_token_at_least(blocks: int, extra: int) -> None:
    simulation = Simulation(num_blocks=100, block_size=16)
    prompt = prompt_of(16 * blocks + extra)
    for name in ("first", "second"):
        simulation.add(name, prompt, max_tokens=8)
        simulation.drain()
    simulation.check_outputs()
    assert simulation.requests["first"].num_cached_tokens == 0
    assert simulation.requests["second"].num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("budget", [37, 512, 4096])
def test_identical_prompts_at_one_instant_never_read_blocks_that_are_not_written(budget: int) -> None:
    simulation = Simulation(num_blocks=700, max_num_batched_tokens=budget)
    for index in range(16):
        simulation.add(str(index), prompt_of(500), max_tokens=10)
    simulation.drain()
    simulation.check_outputs()


def test_a_duplicate_of_a_shared_prefix_is_not_freed_under_a_running_request() -> None:
    simulation = Simulation(num_blocks=60, max_num_batched_tokens=1024)
    prefix = prompt_of(160)
    simulation.add("short", [*prefix, 5], max_tokens=1)
    simulation.add("long", [*prefix, 6], max_tokens=500, ignore_eos=True)
    for index in range(300):
        simulation.add(f"other {index}", prompt_of(70, 1000 + index), max_tokens=3)
    simulation.drain()
    simulation.check_outputs()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_prefix_of_whole_blocks_is_shared_soundly(blocks: int) -> None:
    simulation = Simulation(num_blocks=60, max_num_batched_tokens=128, check=False)
    prefix = prompt_of(16 * blocks)
    for run in range(10):
        for tail in range(6):
            simulation.add(f"{run} {tail}", prefix + prompt_of(tail, tail), max_tokens=40)
        simulation.step()
    simulation.drain()
    simulation.check_outputs()
    assert max(request.num_cached_tokens for request in simulation.requests.values()) >= 16 * blocks


def test_nothing_is_left_after_aborts_in_every_state() -> None:
    simulation = Simulation(num_blocks=400, max_num_batched_tokens=256, max_num_seqs=64, check=False)
    generator = random.Random(1)
    for index in range(500):
        simulation.add(str(index), prompt_of(generator.randrange(1, 300), index % 50), max_tokens=30)
    while simulation.scheduler.has_work:
        simulation.step()
        live = list(simulation.scheduler.requests.values())
        behind = [request for request in live if request.num_behind > 1]
        simulation.abort(*(generator.choice(some).request_id for some in (live, behind) if some))
        simulation.scheduler.check_integrity()
    simulation.drain()
    simulation.check_outputs()
    assert set(simulation.ended.values()) == {"abort", "stop", "length"}


def test_cancelled_and_retried_requests_do_not_disturb_others() -> None:
    simulation = Simulation(num_blocks=40, block_size=8, max_num_batched_tokens=64)
    prefix = prompt_of(24)
    for index in range(20):
        simulation.add(f"shared {index}", prefix + prompt_of(4, index), max_tokens=20)
    for index in range(10):
        simulation.add(f"other {index}", prompt_of(20, 100 + index), max_tokens=40)
    for index in range(0, 20, 3):
        while simulation.requests[f"shared {index}"].num_output_tokens == 0:
            simulation.step()
        simulation.abort(f"shared {index}")
        simulation.add(f"again {index}", prefix + prompt_of(4, index), max_tokens=20)
    simulation.drain()
    simulation.check_outputs()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_canaries_survive_a_churn_of_cancellations(enable_prefix_caching: bool) -> None:
    simulation = Simulation(
        num_blocks=30,
        block_size=8,
        max_num_batched_tokens=48,
        enable_prefix_caching=enable_prefix_caching,
        check=False,
    )
    generator = random.Random(2)
    for index in range(5):
        simulation.add(f"canary {index}", prompt_of(10, index), max_tokens=40, ignore_eos=True)
    for index in range(600):
        simulation.add(str(index), prompt_of(generator.randrange(1, 60), index % 40), max_tokens=20)
        if generator.random() < 0.5:
            simulation.step()
        if generator.random() < 0.6:
            simulation.abort(str(generator.randrange(index + 1)))
    simulation.drain()
    simulation.check_outputs()


def test_equal_requests_one_after_the_other_stay_equal() -> None:
    simulation = Simulation(num_blocks=40)
    for index in range(10):
        simulation.add(str(index), prompt_of(50), max_tokens=30)
        simulation.drain()
    assert len({tuple(request.output_token_ids) for request in simulation.requests.values()}) == 1


def test_cached_prefixes_do_not_overtake_a_cold_request() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=8)
    prefix = prompt_of(64)
    for step in range(60):
        simulation.add(f"warm {step}", prefix + prompt_of(3, step), max_tokens=9, ignore_eos=True)
        if step == 20:
            cold = simulation.add("cold", prompt_of(64, 99), max_tokens=9)
            ahead = simulation.scheduler.num_waiting - 1
        simulation.step()
    simulation.drain()
    assert cold.timeline.admitted is not None
    assert cold.timeline.admitted - cold.arrival_time <= 9 * (ahead // 8 + 2)
    later = simulation.requests["warm 22"].timeline.admitted
    assert later is not None
    assert cold.timeline.admitted <= later


def test_a_cache_near_its_limit_goes_on_finishing_requests() -> None:
    simulation = Simulation(num_blocks=33, block_size=8, max_num_batched_tokens=64, check=False)
    generator = random.Random(3)
    for index in range(150):
        length = generator.randrange(1, 200)
        simulation.add(str(index), prompt_of(length, index), max_tokens=generator.randrange(1, 57), ignore_eos=True)
    since_last_end = 0
    while simulation.scheduler.has_work:
        num_ended = len(simulation.ended)
        simulation.step()
        since_last_end = 0 if len(simulation.ended) > num_ended else since_last_end + 1
        assert since_last_end < 200
    simulation.check_outputs()
    num_tokens = sum(request.num_tokens for request in simulation.requests.values())
    assert simulation.num_computed_tokens < 1.1 * num_tokens  # hardly anything was computed twice


def test_an_aborted_id_can_be_used_again_at_once() -> None:
    simulation = Simulation(num_blocks=20)
    simulation.add("a", prompt_of(20), max_tokens=50, ignore_eos=True)
    simulation.step()
    simulation.abort("a")
    del simulation.ended["a"]
    simulation.add("a", prompt_of(30, 7), max_tokens=5, eos_token_ids=(EOS,))
    output = simulation.step()
    assert output.dropped_request_ids == ["a"]
    assert [new.request_id for new in output.new_requests] == ["a"]
    simulation.drain()
    simulation.check_outputs()


@pytest.mark.parametrize("most_in_flight", [0, 1])
@pytest.mark.parametrize(
    ("length", "config", "expected"),
    [
        (500, {"max_num_batched_tokens": 8192}, 500 + 15 * 4),
        (512, {"max_num_batched_tokens": 8192}, 512 + 15 * 16),
        (500, {"max_num_batched_tokens": 512}, 500 + 15 * 4),
        (500, {"max_num_batched_tokens": 300}, 500 + 15 * 4),
        (500, {"max_num_batched_tokens": 8192, "sliding_window": 40}, 500 + 15 * 4),
        (500, {"max_num_batched_tokens": 8192, "enable_prefix_caching": False}, 16 * 500),
    ],
)
def test_equal_prompts_that_come_at_once_are_computed_once(
    length: int, config: dict[str, Any], expected: int, most_in_flight: int
) -> None:
    simulation = Simulation(num_blocks=700, most_in_flight=most_in_flight, **config)
    for index in range(16):
        simulation.add(str(index), prompt_of(length), max_tokens=1)
    simulation.drain()
    simulation.check_outputs()
    assert simulation.num_computed_tokens == expected


def test_who_computes_a_shared_prefix_may_leave_while_it_is_under_way() -> None:
    """Aborted, failed, or ended by its deadline: who reads its blocks is served, and nobody after that is misled."""
    for leave in ("abort", "fail", "timeout"):
        simulation = Simulation(num_blocks=40, block_size=4, most_in_flight=2)
        deadline = 1.0 if leave == "timeout" else None
        simulation.add("first", prompt_of(40), max_tokens=30, ignore_eos=True, deadline=deadline)
        second = simulation.add("second", prompt_of(40), max_tokens=30, ignore_eos=True)
        simulation.step(failed={"first": "broken"} if leave == "fail" else None)
        assert second.num_cached_tokens == 36
        if leave == "abort":
            simulation.abort("first")
        for index in range(5):
            simulation.add(str(index), prompt_of(40 + index), max_tokens=9)
            simulation.step()
        simulation.drain()
        simulation.check_outputs()
