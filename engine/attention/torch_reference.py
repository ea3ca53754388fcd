"""Attention in plain torch: complete, obvious and slow; the oracle for the other backends."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .metadata import AttentionMetadata, AttentionSpec
from .paged import PagedAttention, rounded

WORKSPACE_ELEMENTS = 2**24
"""Padded scores, or gathered keys and values, of the sequences that are computed together (64 MiB in float32)."""


@dataclass(frozen=True)
class _Piece:
    """Sequences of similar length, padded to the longest. n sequences, Q queries, K keys."""

    rows: Tensor  # [n, Q]: token of each query; padding repeats the sequence's last one
    is_query: Tensor  # bool [n, Q]
    blocks: Tensor  # [n, K / block_size]
    query_positions: Tensor  # [n, Q, 1]
    is_key: Tensor  # bool [n, K]


class TorchReferenceAttention(PagedAttention):
    name: ClassVar[str] = "torch_reference"

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return []

    def prepare(self, metadata: AttentionMetadata) -> None:
        super().prepare(metadata)
        self.stored = (metadata.slot_mapping >= 0).nonzero().flatten()
        self.slots = metadata.slot_mapping[self.stored]
        self.pieces = list(self._pieces(metadata))

    def write_kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        cache = self.cache
        for x, numbers, scales in ((k, cache.keys, cache.key_scales), (v, cache.values, cache.value_scales)):
            new = x[self.stored]
            if self.spec.has_scales:
                new, scale = rounded(new, self.spec.cache_dtype)
                scales[layer].flatten(0, 1)[self.slots] = scale
            numbers[layer].flatten(0, 1)[self.slots] = new

    def forward(self, layer: int, q: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for piece in self.pieces:
            rows = (q[piece.rows], *self._gather(layer, piece.blocks))
            attended = _attend(*rows, piece, self.spec, self.spec.windows[layer])
            out[piece.rows[piece.is_query]] = attended[piece.is_query].to(out.dtype)
        return out

    def _gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """[n, blocks] -> keys and values, each [n, blocks, block_size, num_kv_heads, head_dim]"""
        cache = self.cache
        k, v = cache.keys[layer][blocks], cache.values[layer][blocks]
        if not self.spec.has_scales:
            return k, v
        return (
            k.float() * cache.key_scales[layer][blocks][..., None],
            v.float() * cache.value_scales[layer][blocks][..., None],
        )

    def _pieces(self, metadata: AttentionMetadata) -> Iterator[_Piece]:
        """Cut the sequences, sorted by length, where their padded work would outgrow the workspace."""
        query_lens, seq_lens = np.diff(metadata.host_query_start_loc).tolist(), metadata.host_seq_lens.tolist()
        spec, most_queries, most_keys = self.spec, 0, 0
        members: list[int] = []
        for seq in sorted(range(len(seq_lens)), key=lambda seq: (query_lens[seq], seq_lens[seq])):
            most_queries, most_keys = max(most_queries, query_lens[seq]), max(most_keys, seq_lens[seq])
            per_key = max(most_queries * spec.num_heads, 2 * spec.num_kv_heads * spec.head_dim)
            if members and (len(members) + 1) * most_keys * per_key > WORKSPACE_ELEMENTS:
                yield self._piece(metadata, members)
                members, most_queries, most_keys = [], query_lens[seq], seq_lens[seq]
            members.append(seq)
        if members:
            yield self._piece(metadata, members)

    def _piece(self, metadata: AttentionMetadata, members: list[int]) -> _Piece:
        device, block_size = metadata.seq_lens.device, self.spec.block_size
        seqs = torch.tensor(members, device=device)
        starts, ends = metadata.query_start_loc[seqs].long(), metadata.query_start_loc[seqs + 1].long()
        seq_lens = metadata.seq_lens[seqs].long()
        num_blocks = -(-int(seq_lens.max()) // block_size)
        rows = starts[:, None] + torch.arange(int((ends - starts).max()), device=device)
        is_query = rows < ends[:, None]
        rows = rows.minimum(ends[:, None] - 1)
        return _Piece(
            rows=rows,
            is_query=is_query,
            blocks=metadata.block_table[seqs, :num_blocks].long(),
            query_positions=(rows - ends[:, None] + seq_lens[:, None])[:, :, None],
            is_key=torch.arange(num_blocks * block_size, device=device) < seq_lens[:, None],
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: _Piece, spec: AttentionSpec, window: int | None) -> Tensor:
    """q [n, Q, H, d]; k, v [n, blocks, block_size, G, d] -> float32 [n, Q, H, d]; a key head serves H / G heads."""
    n, num_queries, num_heads, head_dim = q.shape
    num_groups = k.shape[-2]
    q = q.float().view(n, num_queries, num_groups, -1, head_dim).permute(0, 2, 3, 1, 4)  # [n, G, H / G, Q, d]
    k = k.flatten(1, 2).float().permute(0, 2, 3, 1).unsqueeze(2)  # [n, G, 1, d, K]
    # What an earlier owner of the block left behind may be NaN, and 0 * NaN is NaN.
    v = v.flatten(1, 2).float().masked_fill(~piece.is_key[:, :, None, None], 0.0)
    v = v.permute(0, 2, 1, 3).unsqueeze(2)  # [n, G, 1, K, d]
    positions = torch.arange(k.shape[-1], device=q.device)
    visible = positions <= piece.query_positions  # [n, Q, K]
    if window is not None:
        visible &= positions > piece.query_positions - window
    scores = q @ k * spec.scale
    if spec.softcap:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    out = scores.softmax(dim=-1) @ v  # [n, G, H / G, Q, d]
    return out.permute(0, 3, 1, 2, 4).reshape(n, num_queries, num_heads, head_dim)
