"""Requests that want no output, and requests that need every position of their prompt computed."""

import pytest
from simulated_engine import EOS, Simulation

from configs.errors import ContextLengthExceeded


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + position * 7) % 90 + 1 for position in range(length)]


@pytest.mark.parametrize(("length", "num_steps"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_without_output_a_request_ends_with_its_last_chunk(length: int, num_steps: int) -> None:
    simulation = Simulation(num_blocks=100, max_num_batched_tokens=16)
    request = simulation.add("a", prompt_of(length), max_tokens=0, stop_token_ids=tuple(range(1, 91)))
    for _ in range(num_steps):
        assert not simulation.ended
        output = simulation.step()
        assert not output.scheduled[0].needs_sample
    assert simulation.ended == {"a": "length"}
    assert (request.output_token_ids, request.stop_reason) == ([], None)
    assert simulation.scheduler.num_used_blocks == 0


def test_an_end_without_output_is_told_once_and_only_then() -> None:
    simulation = Simulation(num_blocks=100, max_num_batched_tokens=16)
    request = simulation.add("a", prompt_of(20), max_tokens=0)
    results = []
    for _ in range(2):
        output = simulation.scheduler.schedule(0.0)
        results.append(simulation.scheduler.update_from_output(output, simulation.execute(output), {}))
    assert results == [[], [(request, [])]]
    assert request.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(100, 40), (6, 40), (11, 40), (11, 41), (11, 39)])
def test_the_longest_prompt_of_either_kind_runs_and_one_more_is_refused(
    num_blocks: int, max_model_len: int, max_tokens: int
) -> None:
    """Blocks of 4 tokens, the first reserved: the prompt needs its place there, and an output one in the context."""
    longest = min(4 * (num_blocks - 1), max_model_len - max_tokens)
    simulation = Simulation(num_blocks=num_blocks, max_model_len=max_model_len, block_size=4)
    with pytest.raises(ContextLengthExceeded, match=f"{longest + 1} tokens.*at most {longest + max_tokens}$") as error:
        simulation.add("too long", prompt_of(longest + 1), max_tokens=max_tokens)
    assert ("one output token" in error.value.message) == (max_tokens == 1)
    assert ("KV cache" in error.value.message) == (4 * (num_blocks - 1) < max_model_len - max_tokens)
    simulation.add("a", prompt_of(longest), max_tokens=max_tokens)
    simulation.add("b", prompt_of(3), max_tokens=max_tokens)
    simulation.drain()
    simulation.check_outputs()


@pytest.mark.parametrize("sliding_window", [None, 6])
@pytest.mark.parametrize(
    "params", [{"prompt_logprobs": 0}, {"prompt_logprobs": 5, "max_tokens": 0}, {"pooling": "mean", "max_tokens": 0}]
)
def test_a_request_that_reads_its_whole_prompt_skips_nothing_but_others_may_use_it(
    params: dict[str, object], sliding_window: int | None
) -> None:
    simulation = Simulation(num_blocks=50, block_size=4, sliding_window=sliding_window)
    for number in range(2):
        request = simulation.add(f"reads {number}", prompt_of(22), **params)
        simulation.drain()
        assert request.num_cached_tokens == 0
    other = simulation.add("other", prompt_of(22))
    pooled = simulation.add("last", prompt_of(22), max_tokens=0, pooling="last")
    simulation.drain()
    simulation.check_outputs()
    assert (other.num_cached_tokens, pooled.num_cached_tokens) == (20, 20)


def test_a_preempted_request_reads_its_prompt_again_only_before_its_first_output() -> None:
    simulation = Simulation(num_blocks=50, block_size=4, max_num_batched_tokens=8)
    simulation.add("a", prompt_of(22), max_tokens=9, ignore_eos=True, eos_token_ids=(EOS,), prompt_logprobs=2)
    scheduler = simulation.scheduler
    starts = []
    for num_steps in (2, 4, 1):
        for _ in range(num_steps):
            output = simulation.step()
        scheduler._preempt(scheduler.running.pop())
        output = simulation.step()
        starts.append(output.scheduled[0].num_computed_tokens)
    assert starts == [0, 24, 24]
    simulation.drain()
    simulation.check_outputs()
