"""Block tables, cached prefixes and sliding windows."""

import pytest

from configs.sampling import SamplingParams
from configs.settings import SchedulerConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.request import Request


def manager(
    num_blocks: int = 20, *, block_size: int = 4, window: int | None = None, chunk: int = 8, caching: bool = True
) -> KVCacheManager:
    config = SchedulerConfig(block_size=block_size, max_num_batched_tokens=chunk, enable_prefix_caching=caching)
    return KVCacheManager(config, num_blocks=num_blocks, sliding_window=window)


def request(token_ids: list[int], *extra_keys: str) -> Request:
    return Request("r", token_ids, SamplingParams(), arrival_time=0.0, extra_keys=extra_keys)


def compute(kv: KVCacheManager, one: Request, num_tokens: int) -> list[int] | None:
    """Allocate and count as computed."""
    block_ids = kv.allocate(one, num_tokens)
    if block_ids is not None:
        one.num_computed_tokens += num_tokens
        kv.register_full_blocks(one, one.num_computed_tokens)
    return block_ids


def filled(kv: KVCacheManager, token_ids: list[int], *extra_keys: str) -> Request:
    one = request(token_ids, *extra_keys)
    while one.num_behind:
        compute(kv, one, min(one.num_behind, kv.max_chunk))
    return one


def test_blocks_are_allocated_only_when_tokens_need_them() -> None:
    kv = manager()
    one = request(list(range(9)))
    assert compute(kv, one, 3) == [1]
    assert compute(kv, one, 1) == []
    assert compute(kv, one, 5) == [2, 3]
    assert one.block_ids == [1, 2, 3]
    kv.free(one)
    assert kv.pool.num_used == one.num_computed_tokens == 0


def test_nothing_is_allocated_when_blocks_run_short() -> None:
    kv = manager(num_blocks=3)
    one = request(list(range(20)))
    compute(kv, one, 4)
    assert kv.allocate(one, 8) is None
    assert (one.block_ids, kv.pool.num_free) == ([1], 1)


def test_full_blocks_are_found_once_they_are_scheduled_and_never_the_last_token() -> None:
    kv = manager()
    one = request(list(range(10)))
    kv.allocate(one, 7)
    assert kv.find_cached_prefix(request(list(range(10)))) == [1]
    one.num_computed_tokens = 7
    kv.allocate(one, 3)
    assert kv.find_cached_prefix(request(list(range(4)))) == []
    assert kv.find_cached_prefix(request(list(range(5)))) == [1]
    assert kv.find_cached_prefix(request(list(range(12)))) == [1, 2]
    assert kv.find_cached_prefix(request([0, 1, 2, 9, 4, 5, 6, 7, 8])) == []
    assert kv.find_cached_prefix(request([0, 1, 2, 3, 9, 5, 6, 7, 8])) == [1]


def test_a_block_of_tokens_that_are_not_known_yet_is_not_found() -> None:
    kv = manager()
    one = filled(kv, list(range(7)))
    one.num_pending_tokens = 1
    compute(kv, one, 1)
    assert kv.find_cached_prefix(request(list(range(10)))) == [1]
    one.token_ids.append(7)
    one.num_pending_tokens = 0
    kv.register_full_blocks(one, 8)
    assert kv.find_cached_prefix(request(list(range(10)))) == [1, 2]


def test_extra_keys_separate_equal_prompts() -> None:
    kv = manager()
    filled(kv, list(range(9)), "salt")
    assert kv.find_cached_prefix(request(list(range(9)))) == []
    assert kv.find_cached_prefix(request(list(range(9)), "pepper")) == []
    assert kv.find_cached_prefix(request(list(range(9)), "salt")) == [1, 2]


def test_prefix_caching_can_be_switched_off() -> None:
    kv = manager(caching=False)
    filled(kv, list(range(9)))
    assert kv.find_cached_prefix(request(list(range(9)))) == []


def test_a_shared_prefix_is_held_until_its_last_owner_lets_go() -> None:
    kv = manager()
    one, two = filled(kv, list(range(9))), request(list(range(9)))
    kv.adopt(two, kv.find_cached_prefix(two))
    compute(kv, two, 1)
    assert two.block_ids == [1, 2, 4]
    assert kv.pool.num_used == 4
    kv.free(one)
    assert kv.pool.num_used == 3
    kv.free(two)
    assert kv.pool.num_used == 0
    assert kv.find_cached_prefix(request(list(range(9)))) == [1, 2]


def test_a_cached_prefix_is_evicted_from_its_tail() -> None:
    kv = manager(num_blocks=5)
    kv.free(filled(kv, list(range(16))))
    filled(kv, list(range(100, 108)))
    assert kv.find_cached_prefix(request(list(range(16)))) == [1, 2]


def test_forgotten_blocks_are_not_found_again() -> None:
    kv = manager()
    one = filled(kv, list(range(9)))
    kv.forget(one)
    kv.free(one)
    assert kv.find_cached_prefix(request(list(range(9)))) == []
    kv.pool.check_integrity()


def test_admission_counts_all_tokens_and_only_blocks_that_must_come_from_the_free_list() -> None:
    kv = manager(num_blocks=6)
    one = filled(kv, list(range(8)))
    two = request(list(range(17)))  # 5 blocks, of which 2 are shared with `one`; 3 are free
    prefix = kv.find_cached_prefix(two)
    assert kv.can_admit(two, prefix, 0)
    assert not kv.can_admit(two, prefix, 1)
    kv.free(one)  # now all 5 are free, but the two cached ones as well come from the free list
    assert kv.can_admit(two, prefix, 0)
    assert not kv.can_admit(two, prefix, 1)


def test_blocks_come_back_as_the_window_moves_on() -> None:
    kv = manager(window=5)
    one = request(list(range(40)))
    compute(kv, one, 8)  # token 8 reads 4 … 8
    compute(kv, one, 1)
    assert one.block_ids == [0, 2, 3]
    compute(kv, one, 2)  # token 9 reads 5 … 9
    assert one.block_ids == [0, 2, 3]
    compute(kv, one, 1)
    compute(kv, one, 1)  # token 12 reads 8 … 12
    assert one.block_ids[:3] == [0, 0, 3]
    assert kv.pool.num_used == 2
    kv.free(one)
    assert kv.pool.num_used == 0
    kv.pool.check_integrity()


def test_a_window_reuses_the_end_of_a_prefix_whose_start_is_gone() -> None:
    kv = manager(num_blocks=20, window=5)
    kv.free(filled(kv, list(range(16))))
    table = kv.find_cached_prefix(request(list(range(17))))
    assert table[:3] == [0, 0, 0]
    assert table[3] != 0
    kv.pool.forget(table[3])
    table = kv.find_cached_prefix(request(list(range(17))))
    assert table[:2] == [0, 0]
    assert len(table) == 3
    two = request(list(range(17)))
    kv.adopt(two, table)
    assert (two.num_computed_tokens, two.num_released_blocks, kv.pool.num_used) == (12, 2, 1)
    compute(kv, two, 5)
    kv.free(two)
    kv.pool.check_integrity()


def test_a_window_needs_every_block_it_reaches() -> None:
    kv = manager(num_blocks=20, window=9)
    kv.free(filled(kv, list(range(16))))
    table = kv.find_cached_prefix(request(list(range(17))))
    assert table[:2] == [0, 0]
    kv.pool.forget(table[2])
    assert len(kv.find_cached_prefix(request(list(range(17))))) == 2  # the window reaches blocks 0 and 1
    kv.pool.forget(1)
    assert kv.find_cached_prefix(request(list(range(17)))) == []


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("num_blocks", range(2, 8))
def test_a_lone_request_never_needs_more_than_was_promised(block_size: int, window: int, num_blocks: int) -> None:
    for chunk in (1, 3, 8):
        kv = manager(num_blocks, block_size=block_size, window=window, chunk=chunk)
        one = request(list(range(min(kv.max_tokens, 60))))
        assert kv.can_admit(one, [], 0)
        peak = 0
        while one.num_behind:
            assert compute(kv, one, min(one.num_behind, kv.max_chunk)) is not None
            peak = max(peak, kv.pool.num_used)
        assert peak <= kv._peak_blocks(one.num_tokens)
        kv.free(one)
        kv.pool.check_integrity()
