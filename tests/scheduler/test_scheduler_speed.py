"""The scheduler's share of a step."""

import statistics
import sys
import time

import pytest

from configs.sampling import SamplingParams
from configs.settings import SchedulerConfig
from scheduler.request import Request
from scheduler.scheduler import Scheduler


def milliseconds_per_step(num_seqs: int) -> float:
    """Median of schedule and update over 200 steps of `num_seqs` decoding requests."""
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=8 * num_seqs)
    scheduler = Scheduler(config, num_blocks=40 * num_seqs, max_model_len=4096)
    params = SamplingParams(max_tokens=None)
    for index in range(num_seqs):
        scheduler.add_request(Request(str(index), [index] * 8, params, arrival_time=index, eos_token_ids=(0,)))
    durations = []
    for step in range(200):
        start = time.perf_counter()
        output = scheduler.schedule(step)
        middle = time.perf_counter()
        sampled = {row.request_id: 1 + step % 7 for row in output.scheduled}
        resumed = time.perf_counter()
        scheduler.update_from_output(output, sampled, {})
        durations.append(middle - start + time.perf_counter() - resumed)
    assert scheduler.num_running == num_seqs
    return statistics.median(durations) * 1000


@pytest.mark.slow
@pytest.mark.skipif(sys.gettrace() is not None, reason="coverage slows the step down several times")
def test_a_step_of_256_requests_takes_less_than_a_millisecond_and_cost_grows_linearly() -> None:
    cost = {num_seqs: milliseconds_per_step(num_seqs) for num_seqs in (256, 1024)}
    assert cost[256] < 1.0
    assert cost[1024] < 4 * 2 * cost[256]  # linear would be 4
