"""Types between the step and an attention backend.

Tokens of a step are packed request after request; a request's KV lies in blocks of the cache:

    tokens        | request 0 | request 1          | request 2 |
    query_start_loc  0          n0                   n0 + n1     n0 + n1 + n2
    cache slot of a token = block id * block_size + offset in the block
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from engine.transfer import upload


@dataclass(frozen=True)
class AttentionMetadata:
    """Made once per step, shared by all layers. Lengths count tokens."""

    query_start_loc: Tensor
    """int32 [num_seqs + 1]"""
    seq_lens: Tensor
    """int32 [num_seqs]: tokens visible after this step, those of this step included."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]: block ids in order of position; padded with 0, the reserved block."""
    slot_mapping: Tensor
    """int64 [num_tokens]: cache slot of each token; -1 is not stored."""
    host_query_start_loc: np.ndarray
    """As above, for plans that are made on the host without waiting for the device. Where the step is replayed from a
    CUDA graph these two hold the largest values that any replay has."""
    host_seq_lens: np.ndarray

    @classmethod
    def from_host(
        cls,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        slot_mapping: np.ndarray,
        device: torch.device | None = None,
    ) -> Self:
        """From arrays of the types above; `device` None is the CPU."""
        host = query_start_loc, seq_lens
        starts, lens, table, slots = upload((*host, block_table, slot_mapping), device or torch.device("cpu"))
        return cls(starts, lens, table, slots, *host)

    @cached_property
    def max_query_len(self) -> int:
        return int(np.diff(self.host_query_start_loc).max(initial=0))


@dataclass(frozen=True)
class AttentionSpec:
    """What a backend has to serve."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int
    """Tokens."""
    windows: tuple[int | None, ...]
    """Of each layer: a query sees so many positions up to its own."""
    scale: float
    """Scores are q . k * scale,"""
    softcap: float = 0.0
    """and then, unless this is 0, softcap * tanh(score / softcap)."""
    kv_cache_dtype: torch.dtype | None = None
    """int8 and the float8 types: each token's key and value of a head is rounded to 8 bits and has a float32 scale, its
    greatest magnitude over the type's greatest number. None: `dtype`."""
    capability: tuple[int, int] = (0, 0)
    """Of a CUDA device, such as (9, 0)."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers."""
        return 2 * self.num_kv_heads * self.vector_bytes * self.block_size * self.num_layers

    @property
    def vector_bytes(self) -> int:
        """Bytes of one token's key or value of one head."""
        return self.head_dim + 4 if self.has_scales else self.head_dim * self.cache_dtype.itemsize

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_cache_dtype or self.dtype

    @property
    def has_scales(self) -> bool:
        return self.cache_dtype.itemsize == 1


@dataclass(frozen=True)
class KVCache:
    """Keys and values, one tensor each per layer. The layout is the backend's own."""

    keys: list[Tensor]
    values: list[Tensor]
    num_blocks: int
    """Block 0 is reserved: it pads block tables and belongs to no request."""
    key_scales: list[Tensor] = field(default_factory=list)
    """Where they are kept apart from the numbers, one per layer."""
    value_scales: list[Tensor] = field(default_factory=list)


class AttentionBackend(Protocol):
    """Attention over the paged cache: `prepare` once per step, then `run` for every layer."""

    name: ClassVar[str]
    captures_decode: ClassVar[bool]
    """Whether `run` can be captured in a CUDA graph where each sequence has one query, and replayed after the tensors
    of the metadata were changed in place."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Reasons why it cannot serve `spec`; none means that it can."""
        ...

    def __init__(self, spec: AttentionSpec) -> None: ...

    def allocate(self, num_blocks: int) -> KVCache:
        """A zero-filled cache, which the backend uses from now on."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> None: ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v [num_tokens, num_kv_heads, head_dim], then attend with q [num_tokens, num_heads, head_dim].

        All is stored before anything is read: a request may share blocks that another one fills in the same step.
        Returns the shape of q.
        """
        ...
