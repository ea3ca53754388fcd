"""`KVCacheManager`: which blocks hold a request's KV, and which of them it can share.

    position  0                    num_computed_tokens
              |<- window left it ->|<- KV written ->|<- this step ->|<- later ->|
    table     | 0  0  0  0  0      | 7  3  9  12    | 4  8          |
              |   given back       |       registered when full     | not yet allocated

Without a sliding window nothing is given back before the end.
"""

import sys

from configs.settings import DEFAULT_BATCHED_TOKENS, DEFAULT_BLOCK_SIZE, SchedulerConfig

from .block_pool import NULL_BLOCK, BlockPool, hash_block, root_hash
from .request import Request


class KVCacheManager:
    """Block tables of the requests over one `BlockPool`.

    `max_tokens` is the most tokens whose KV a single request can have, `max_chunk` the most that it can add in
    one step, both in a pool that it has for itself.
    """

    def __init__(self, config: SchedulerConfig, *, num_blocks: int, sliding_window: int | None = None) -> None:
        """`sliding_window`: a token at position p reads the positions p - sliding_window + 1 … p. Given only
        when it holds for every layer, since a block spans all layers."""
        assert sliding_window is None or sliding_window >= 1, sliding_window
        self.pool = BlockPool(num_blocks)
        self.block_size = config.block_size or DEFAULT_BLOCK_SIZE
        self.sliding_window = sliding_window
        self.enable_prefix_caching = config.enable_prefix_caching
        self.max_tokens = (num_blocks - 1) * self.block_size
        self.max_chunk = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        if sliding_window is not None:
            # Inverse of _peak_blocks: what fits beside a window that ends and begins inside a block.
            room = (num_blocks - 2) * self.block_size - sliding_window + 2
            if room >= 1:
                self.max_tokens = sys.maxsize
                self.max_chunk = min(self.max_chunk, room)

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Block table of the longest prefix whose KV is in the cache, block 0 where the window does not reach.

        The last token is never part of it: its logits are what the request waits for.
        """
        if not self.enable_prefix_caching or request.reads_whole_prompt:
            return []
        hashes = self._block_hashes(request, (request.num_tokens - 1) // self.block_size)
        found: list[int] = []
        first_found = 0  # start of the unbroken run of cached blocks that ends here
        num_blocks = 0  # of the best prefix so far
        for index, block_hash in enumerate(hashes):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                if self.sliding_window is None:
                    break
                first_found = index + 1
            found.append(block_id or NULL_BLOCK)
            if first_found <= self._first_visible_block((index + 1) * self.block_size):
                num_blocks = index + 1
        first_visible = self._first_visible_block(num_blocks * self.block_size)
        return [NULL_BLOCK] * first_visible + found[first_visible:num_blocks]

    def can_admit(self, request: Request, cached_prefix: list[int], num_spare_blocks: int) -> bool:
        """Whether all tokens that the request has by now fit, with `num_spare_blocks` left for others."""
        already_used = sum(self.pool.ref_count(block_id) > 0 for block_id in cached_prefix)
        num_needed = self._peak_blocks(request.num_tokens) - already_used
        return self.pool.num_free >= num_needed + num_spare_blocks

    def adopt(self, request: Request, cached_prefix: list[int]) -> None:
        """Start the block table of a request with what `find_cached_prefix` returned."""
        assert not request.block_ids, request
        num_tokens = len(cached_prefix) * self.block_size
        request.block_ids = cached_prefix
        request.num_registered_blocks = len(cached_prefix)
        request.num_released_blocks = self._first_visible_block(num_tokens)
        request.num_computed_tokens = num_tokens
        self.pool.share(cached_prefix[request.num_released_blocks :])

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the next `num_tokens` tokens; None, and nothing allocated, when blocks run short.

        Returns the new blocks, in order. Blocks that the window has left are given back first. Blocks that these tokens
        fill can be found from now on: every backend writes a layer's KV before it attends, so requests that are
        admitted to the same step may read them.
        """
        if self.sliding_window is not None:
            self._release_invisible(request)
        num_blocks = -(-(request.num_computed_tokens + num_tokens) // self.block_size)
        num_new = max(0, num_blocks - len(request.block_ids))
        if num_new > self.pool.num_free:
            return None
        new_block_ids = self.pool.allocate(num_new)
        request.block_ids += new_block_ids
        self.register_full_blocks(request, request.num_computed_tokens + num_tokens)
        return new_block_ids

    def register_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the blocks that are full once so many tokens are computed, as far as their ids are known."""
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_registered_blocks or not self.enable_prefix_caching:
            return
        hashes = self._block_hashes(request, num_full)
        for index in range(max(request.num_registered_blocks, request.num_released_blocks), num_full):
            self.pool.register(request.block_ids[index], hashes[index])
        request.num_registered_blocks = num_full

    def free(self, request: Request) -> None:
        """Give all blocks back, the last first, so that a prefix is evicted from its tail."""
        self.pool.free(reversed(request.block_ids[request.num_released_blocks :]))
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_released_blocks = 0
        request.num_computed_tokens = 0

    def forget(self, request: Request) -> None:
        """Take the request's blocks out of the prefix cache: their content is not to be trusted."""
        for block_id in request.block_ids:
            self.pool.forget(block_id)

    def _block_hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """Hashes of the first `num_blocks` blocks, each computed once in the request's life."""
        hashes = request.block_hashes
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else root_hash(request.extra_keys)
            start = index * self.block_size
            hashes.append(hash_block(parent, request.token_ids[start : start + self.block_size]))
        return hashes[:num_blocks]

    def _release_invisible(self, request: Request) -> None:
        first_visible = self._first_visible_block(request.num_computed_tokens)
        released = range(request.num_released_blocks, first_visible)
        self.pool.free(request.block_ids[index] for index in reversed(released))
        for index in released:
            request.block_ids[index] = NULL_BLOCK
        request.num_released_blocks = first_visible

    def _first_visible_block(self, num_computed_tokens: int) -> int:
        """Index of the first block that the next token, and so any later one, reads."""
        if self.sliding_window is None:
            return 0
        return max(0, num_computed_tokens - self.sliding_window + 1) // self.block_size

    def _peak_blocks(self, num_tokens: int) -> int:
        """Most blocks held at once while `num_tokens` tokens are computed.

        A step holds sliding_window - 1 tokens before its chunk; n tokens touch at most
        ceil((n - 1) / block_size) + 1 blocks.
        """
        num_blocks = -(-num_tokens // self.block_size)
        if self.sliding_window is None:
            return num_blocks
        num_held = self.sliding_window - 1 + self.max_chunk
        return min(num_blocks, -(-(num_held - 1) // self.block_size) + 1)
