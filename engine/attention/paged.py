"""`PagedAttention`: the cache of every backend but the CPU's own.

Layout per layer: [num_blocks, block_size, num_kv_heads, head_dim] (NHD); scales of 8-bit types without the last
dimension. It is what FlashAttention, FlashInfer and torch take as it is, xformers as a view, Triton by its strides.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from .metadata import AttentionMetadata, AttentionSpec, KVCache
from .storage import zeros


class PagedAttention(ABC):
    """See `AttentionBackend`; `run` in two parts, for operations that store keys and values by themselves."""

    name: ClassVar[str]
    captures_decode: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def allocate(self, num_blocks: int) -> KVCache:
        """Zeros, not what memory held: some kernels multiply whole blocks, and 0 * NaN is NaN."""
        spec = self.spec
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        keys, values = (self._per_layer(shape, spec.cache_dtype) for _ in "kv")
        scales = (self._per_layer(shape[:-1], torch.float32) for _ in "kv" if spec.has_scales)
        self.cache = KVCache(keys, values, num_blocks, *scales)
        return self.cache

    def prepare(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write_kv(layer, k, v)
        return self.forward(layer, q)

    @abstractmethod
    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v [num_tokens, num_kv_heads, head_dim] where the slots are not negative."""

    @abstractmethod
    def forward(self, layer: int, q: Tensor) -> Tensor:
        """Attend with q [num_tokens, num_heads, head_dim] to what is stored; returns the shape of q."""

    def _per_layer(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [zeros(shape, dtype, self.spec.device) for _ in range(self.spec.num_layers)]


class StoredBySlot(PagedAttention):
    """The write of backends that have no kernel of their own for it, to a cache without scales.

    What has no slot is written to block 0, which nobody reads: so nothing is counted or selected on the host, and a
    CUDA graph follows when the slots change.
    """

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        slots = self.metadata.slot_mapping.clamp(min=0)
        for numbers, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
            numbers.flatten(0, 1).index_copy_(0, slots, new)


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] in an 8-bit type, and float32 scales [...] with which it is multiplied again."""
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.float().abs().amax(-1) / limit
    scaled = x.float() / torch.where(scale == 0, 1.0, scale)[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale
