"""What is counted and noted, against what the simulated engine saw."""

from simulated_engine import Simulation

from scheduler.timeline import MAX_CHUNKS, Chunk, Counters, Timeline


def test_chunks_name_the_steps_they_were_in() -> None:
    simulation = Simulation(num_blocks=20, max_num_batched_tokens=8)
    decoding = simulation.add("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    simulation.step()
    behind = simulation.add("b", range(10), max_tokens=2, ignore_eos=True)
    simulation.drain()
    assert decoding.timeline.chunks == [Chunk(0.0, 3, 3, 1)]
    assert behind.timeline.chunks == [Chunk(1.0, 7, 8, 2), Chunk(2.0, 3, 4, 2)]
    assert (behind.timeline.queued, behind.timeline.admitted, behind.timeline.num_chunks) == (1.0, 1.0, 2)


def test_counters_equal_what_the_engine_computed() -> None:
    simulation = Simulation(num_blocks=9, block_size=4, max_num_batched_tokens=16, enable_prefix_caching=False)
    for number in range(4):
        simulation.add(str(number), range(number + 3), max_tokens=16, ignore_eos=True)
    simulation.drain()
    counters, requests = simulation.scheduler.counters, simulation.requests.values()
    assert counters.num_step_tokens == simulation.num_computed_tokens
    assert counters.num_preemptions == simulation.num_preemptions > 0
    needed = sum(request.num_tokens - 1 for request in requests)
    assert counters.num_recomputed_tokens == simulation.num_computed_tokens - needed > 0
    assert sum(request.timeline.num_recomputed_tokens for request in requests) == counters.num_recomputed_tokens
    assert sum(request.timeline.num_preemptions for request in requests) == counters.num_preemptions
    assert counters.num_prefix_hits == 0


def test_prefix_hits_are_counted_in_tokens() -> None:
    simulation = Simulation(num_blocks=20, block_size=4)
    for name in "ab":
        simulation.add(name, range(10), max_tokens=1)
        simulation.drain()
    counters = simulation.scheduler.counters
    assert (counters.num_prefix_queries, counters.num_prefix_hits) == (20, 8)
    assert counters.num_step_requests == counters.num_steps == 2


def test_why_somebody_waits() -> None:
    for cause, config in {
        "seats": {"max_num_seqs": 1},
        "tokens": {"max_num_batched_tokens": 9},
        "blocks": {"num_blocks": 4},
    }.items():
        simulation = Simulation(**{"num_blocks": 40, "block_size": 4} | config)
        simulation.add("a", range(9), max_tokens=2, ignore_eos=True)
        simulation.step()
        assert simulation.scheduler.wait_cause is None
        simulation.add("b", range(20, 29), max_tokens=1)
        simulation.add("c", range(40, 49), max_tokens=1)
        simulation.step()
        assert simulation.scheduler.wait_cause == cause
        simulation.drain()
        simulation.step()
        assert simulation.scheduler.wait_cause is None


def test_who_waits_while_running_ones_are_short_waits_for_blocks() -> None:
    simulation = Simulation(num_blocks=6, block_size=4, max_num_batched_tokens=16)
    for name in "ab":
        simulation.add(name, range(5), max_tokens=9, ignore_eos=True)
    while simulation.num_preemptions == 0:
        simulation.step()
    assert simulation.scheduler.wait_cause == "blocks"


def test_only_so_many_chunks_are_kept() -> None:
    timeline = Timeline(queued=0.0)
    for number in range(MAX_CHUNKS + 5):
        timeline.add_chunk(Chunk(float(number), 2, 2, 1))
    assert (len(timeline.chunks), timeline.num_chunks) == (MAX_CHUNKS, MAX_CHUNKS + 5)


def test_the_batch_met_while_decoding_is_averaged_over_its_steps() -> None:
    counters = Counters(num_steps=10, num_step_requests=50)
    timeline = Timeline(queued=0.0)
    timeline.note_end(1.0, counters)
    assert (timeline.ended, timeline.mean_step_requests) == (1.0, 0.0)
    timeline.note_first_token(1.0, counters)
    timeline.note_end(2.0, Counters(num_steps=14, num_step_requests=62))
    assert (timeline.num_decode_steps, timeline.mean_step_requests, timeline.ended) == (4, 3.0, 2.0)


def test_counters_of_several_engines_add_up() -> None:
    one, other = Counters(num_steps=2, num_preemptions=1), Counters(num_steps=5, num_prefix_hits=3)
    assert one + other == Counters(num_steps=7, num_preemptions=1, num_prefix_hits=3)
    assert (one.num_steps, other.num_steps) == (2, 5)
