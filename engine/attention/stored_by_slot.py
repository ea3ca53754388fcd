"""`StoredBySlot`: the write of backends that have no kernel of their own for it."""

from torch import Tensor

from .paged import PagedAttention


class StoredBySlot(PagedAttention):
    """A cache without scales. What has no slot is written to block 0, which nobody reads: so nothing is counted or
    selected on the host, and a CUDA graph follows when the slots change."""

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        slots = self.metadata.slot_mapping.clamp(min=0)
        for numbers, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
            numbers.flatten(0, 1).index_copy_(0, slots, new)
