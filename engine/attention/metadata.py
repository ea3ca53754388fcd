"""Types between the step and an attention backend.

Tokens of a step are packed request after request; a request's KV lies in blocks of the cache:

    tokens        | request 0 | request 1          | request 2 |
    query_start_loc  0          n0                   n0 + n1     n0 + n1 + n2
    cache slot of a token = block id * block_size + offset in the block
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


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
    max_query_len: int
    max_seq_len: int


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
    num_layers: int
    windows: tuple[int | None, ...]
    """Per layer; see ModelConfig.sliding_windows."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size * self.num_layers


@dataclass(frozen=True)
class KVCache:
    """Keys and values, one tensor each per layer. The layout is the backend's own."""

    keys: list[Tensor]
    values: list[Tensor]
    num_blocks: int
    """Block 0 is reserved: it pads block tables and belongs to no request."""


class AttentionBackend(Protocol):
    """Attention over the paged cache: `prepare` once per step, then `run` for every layer."""

    name: ClassVar[str]

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Reasons why it cannot serve `spec`; none means that it can."""
        ...

    def __init__(self, spec: AttentionSpec) -> None: ...

    def allocate(self, num_blocks: int) -> KVCache:
        """A zero-filled cache, which the backend uses from now on."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> None: ...

    def run(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float = 0.0
    ) -> Tensor:
        """Store k and v [num_tokens, num_kv_heads, head_dim], then attend with q [num_tokens, num_heads, head_dim].

        A query sees the positions up to its own, the last `window` of them where there is a window: one of the
        spec's. Scores are q . k * scale, and with a softcap softcap * tanh(score / softcap). Returns the shape of q.
        """
        ...
