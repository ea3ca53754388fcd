"""Attention in plain torch: complete, obvious and slow; the oracle for the other backends.

Cache layout per layer: [num_blocks, block_size, num_kv_heads, head_dim] (NHD).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .metadata import AttentionMetadata, AttentionSpec, KVCache
from .storage import zeros

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


class TorchReferenceAttention:
    name: ClassVar[str] = "torch_reference"

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return ["keeps no int8 cache; take kv_cache_dtype auto"] if spec.kv_cache_dtype == torch.int8 else []

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def allocate(self, num_blocks: int) -> KVCache:
        spec = self.spec
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        keys, values = ([zeros(shape, spec.dtype, spec.device) for _ in range(spec.num_layers)] for _ in "kv")
        self.cache = KVCache(keys, values, num_blocks)
        return self.cache

    def prepare(self, metadata: AttentionMetadata) -> None:
        self.stored = (metadata.slot_mapping >= 0).nonzero().flatten()
        self.slots = metadata.slot_mapping[self.stored]
        self.pieces = list(self._pieces(metadata))

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.flatten(0, 1)[self.slots] = k[self.stored]
        values.flatten(0, 1)[self.slots] = v[self.stored]
        out = torch.empty_like(q)
        for piece in self.pieces:
            rows = (q[piece.rows], keys[piece.blocks], values[piece.blocks])
            attended = _attend(*rows, piece, self.spec, self.spec.windows[layer])
            out[piece.rows[piece.is_query]] = attended[piece.is_query].to(out.dtype)
        return out

    def _pieces(self, metadata: AttentionMetadata) -> Iterator[_Piece]:
        """Cut the sequences, sorted by length, where their padded work would outgrow the workspace."""
        starts = metadata.query_start_loc.long()
        query_lens, seq_lens = (starts[1:] - starts[:-1]).tolist(), metadata.seq_lens.tolist()
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
