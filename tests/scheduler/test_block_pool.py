"""`BlockPool` against a model made of plain lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.block_pool import FREE_CACHED, NULL_BLOCK, BlockPool, hash_block, root_hash


def free_list(pool: BlockPool) -> list[int]:
    """Blocks in the order in which they would be handed out."""
    order: list[int] = []
    while len(order) < pool.num_free:
        order.append(pool._next[order[-1] if order else NULL_BLOCK])
    return order


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share and give back blocks; the model keeps order, references and hashes naively."""

    num_blocks = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.num_blocks)
        self.free = list(range(1, self.num_blocks))
        self.owned: list[int] = []  # one entry per reference
        self.hashes: dict[int, bytes] = {}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.free)))
        block_ids = self.pool.allocate(number)
        assert block_ids == self.free[:number]
        del self.free[:number]
        for block_id in block_ids:
            self.hashes.pop(block_id, None)
        self.owned += block_ids

    @precondition(lambda self: bool(self.owned))
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(self.owned), unique=True))
        self.pool.free(block_ids)
        for block_id in block_ids:
            self.owned.remove(block_id)
            if block_id not in self.owned and block_id in self.hashes:
                self.free.append(block_id)
            elif block_id not in self.owned:
                self.free.insert(0, block_id)

    @rule(name=st.binary(min_size=1, max_size=1))
    def share_found(self, name: bytes) -> None:
        block_id = self.pool.find(name)
        assert block_id == next((block for block, value in self.hashes.items() if value == name), None)
        if block_id is not None:
            self.pool.share([block_id])
            self.owned.append(block_id)
            if block_id in self.free:
                self.free.remove(block_id)

    @precondition(lambda self: bool(set(self.owned) - set(self.hashes)))
    @rule(data=st.data(), name=st.sampled_from([b"\0", b"\1", b"\2"]))
    def register(self, data: st.DataObject, name: bytes) -> None:
        block_id = data.draw(st.sampled_from(sorted(set(self.owned) - set(self.hashes))))
        self.pool.register(block_id, name)
        if name not in self.hashes.values():
            self.hashes[block_id] = name

    @rule(block_id=st.integers(0, num_blocks - 1))
    def forget(self, block_id: int) -> None:
        self.pool.forget(block_id)
        self.hashes.pop(block_id, None)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert free_list(self.pool) == self.free
        assert self.pool.num_used == len(set(self.owned))
        assert all(self.pool.ref_count(block) == self.owned.count(block) for block in range(self.num_blocks))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_block_zero_is_never_handed_out() -> None:
    assert BlockPool(5).allocate(4) == [1, 2, 3, 4]


def test_taking_more_than_is_free_or_freeing_twice_is_a_bug() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError):
        pool.free(block_ids)


def test_empty_blocks_are_taken_before_cached_ones_and_those_least_recently_used_first() -> None:
    pool = BlockPool(6)
    for block_id in pool.allocate(5):
        if block_id != 3:
            pool.register(block_id, bytes([block_id]))
    pool.free([2, 1])
    pool.free([3])
    pool.free([5, 4])
    pool.share([2])
    pool.free([2])
    assert pool.allocate(5) == [3, 1, 5, 4, 2]


def test_reused_blocks_are_no_longer_found() -> None:
    pool = BlockPool(2)
    pool.register(pool.allocate(1)[0], b"x")
    pool.free([1])
    assert pool.find(b"x") == 1
    pool.allocate(1)
    assert pool.find(b"x") is None


def test_the_hash_depends_on_parent_tokens_order_and_extra_keys() -> None:
    roots = [root_hash(keys) for keys in ((), ("a",), ("a", "b"), ("ab",), ("b", "a"), ("a'", "b"))]
    hashes = [hash_block(root, ids) for root in roots for ids in ([1, 2], [2, 1], [1], [258], [1, 2, 0])]
    assert len(set(roots)) == 6
    assert len(set(hashes)) == 30
    assert hash_block(roots[0], [1, 2]) == hashes[0]
    assert all(len(value) == 32 for value in hashes)  # bytes: too long to collide


def test_integrity_check_notices_damage() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    pool.check_integrity()
    pool._ref_counts[1] = 0
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_states_tell_free_cached_used_and_shared_blocks_apart() -> None:
    pool = BlockPool(6)
    used, shared, cached, _ = pool.allocate(4)
    pool.register(shared, b"a")
    pool.register(cached, b"b")
    pool.share([shared] * 400)
    pool.free([cached])
    states = pool.states()
    assert (states[NULL_BLOCK], states[used], states[shared], states[cached], states[5]) == (0, 1, 254, FREE_CACHED, 0)
    assert len(states) == 6
