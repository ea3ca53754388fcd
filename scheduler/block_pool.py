"""`BlockPool`: who owns the blocks of the KV cache. It knows blocks, references and hashes, not requests.

Every block but block 0 is in one of three states:

    used          ref_count > 0    in block tables; may have a hash, so that others can share it
    free, cached  ref_count = 0    in the free list with a hash: content still valid, can be shared again
    free, empty   ref_count = 0    in the free list without a hash

The free list is in order of eviction: empty blocks first, then cached ones, least recently used first.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

NULL_BLOCK = 0
"""Never handed out: padding of block tables, and the place of blocks that a sliding window has left."""

FREE_CACHED = 255
"""In `BlockPool.states`."""


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash of a full block: chained over the hash before it, so that it stands for the whole prefix.

    Cryptographic: two prefixes with one hash would silently read each other's KV.
    """
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


def root_hash(extra_keys: tuple[str, ...]) -> bytes:
    """Parent of a request's first block; different keys separate all blocks that follow."""
    return blake2b(repr(extra_keys).encode(), digest_size=32).digest()


class BlockPool:
    """Blocks 1 … num_blocks - 1, all free at first.

    The free list is doubly linked through `_next` and `_previous`, which are indexed by block: taking a shared
    block out of the middle costs O(1) and no block is ever an object of its own. Block 0, never free itself,
    closes the ring: `_next[0]` is evicted first, `_previous[0]` last.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def find(self, block_hash: bytes) -> int | None:
        """The block with that content, used or free."""
        return self._block_of_hash.get(block_hash)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the free list's front; cached content in them is evicted."""
        assert num_blocks <= self.num_free, (num_blocks, self.num_free)
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._next[NULL_BLOCK]
            self._unlink(block_id)
            self.forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that `find` returned, taking the free ones out of the free list."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each. Of the blocks that become free, those named first are evicted first."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, block_id
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                is_cached = self._hashes[block_id] is not None
                self._link(block_id, before=NULL_BLOCK if is_cached else self._next[NULL_BLOCK])

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Let `find` return this block, whose KV is complete.

        Of two blocks with the same content the first stays registered; the second remains its owner's alone.
        """
        assert self._ref_counts[block_id] > 0, block_id
        assert self._hashes[block_id] is None, block_id
        if self._block_of_hash.setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash

    def forget(self, block_id: int) -> None:
        """Let nobody find this block any more."""
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            self._hashes[block_id] = None
            del self._block_of_hash[block_hash]

    def states(self) -> bytes:
        """Of each block, block 0 included: its references, 254 at most; a free block is 0, or `FREE_CACHED`."""
        pairs = zip(self._ref_counts, self._hashes, strict=True)
        return bytes(
            min(count, FREE_CACHED - 1) if count or block_hash is None else FREE_CACHED for count, block_hash in pairs
        )

    def check_integrity(self) -> None:
        """Assert that list, references and hashes agree. O(blocks)."""
        free: list[int] = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK and len(free) < self.num_blocks:
            assert self._previous[self._next[block_id]] == block_id, block_id
            free.append(block_id)
            block_id = self._next[block_id]
        assert len(free) == len(set(free)) == self.num_free, (len(free), self.num_free)
        unreferenced = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        assert unreferenced == {NULL_BLOCK, *free}, unreferenced.symmetric_difference(free)
        assert min(self._ref_counts) == 0, min(self._ref_counts)
        hashed = {value: block_id for block_id, value in enumerate(self._hashes) if value is not None}
        assert hashed == self._block_of_hash, (len(hashed), len(self._block_of_hash))

    def _link(self, block_id: int, before: int) -> None:
        after = self._previous[before]
        self._previous[block_id], self._next[block_id] = after, before
        self._next[after] = self._previous[before] = block_id
        self.num_free += 1

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1
