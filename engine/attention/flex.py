"""FlexAttention: a kernel that torch.compile writes around our mask and score functions. Only for those who name it.

Each sequence's queries are padded to whole tiles, so that a tile belongs to one sequence and its list of key blocks is
that sequence's row of the block table. Keys are addressed by cache slot; `place_of` tells where a block stands:

    queries     | sequence 0          | sequence 1, ...
    tiles       | tile 0   | tile 1 : | tile 2 :          ":" is followed by padding, which sees nothing
    kv_indices  | table[0] | table[0] | table[1]
    place_of    [sequence, block id] -> index of the block in the sequence, -1 where it is not one of its blocks
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from engine.transfer import upload

from .metadata import AttentionMetadata, AttentionSpec
from .paged import StoredBySlot

TILE = 32
"""Queries. One size for all steps: it is compiled in, as the size of blocks is."""
UNLIMITED = 2**31 - 1


class FlexAttention(StoredBySlot):
    name: ClassVar[str] = "flex"

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = []
        if spec.device.type not in ("cpu", "cuda"):
            reasons.append(f"it needs a CPU or a CUDA device, not {spec.device.type}")
        if spec.has_scales:
            reasons.append(f"it has no cache of {spec.cache_dtype}")
        if spec.block_size % 16:
            reasons.append(f"block_size {spec.block_size} is no multiple of 16")
        return reasons

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.score_mod = _capped(spec.softcap) if spec.softcap else None
        self.windows = {
            window: torch.tensor(window or UNLIMITED, device=spec.device)  # a number would be compiled in
            for window in set(spec.windows)
        }
        self.kernel_options = _kernel_options(spec.block_size) if spec.device.type == "cuda" else None

    def prepare(self, metadata: AttentionMetadata) -> None:
        super().prepare(metadata)
        starts, seq_lens = metadata.host_query_start_loc.astype(np.int64), metadata.host_seq_lens.astype(np.int64)
        query_lens = np.diff(starts)
        tiles = -(-query_lens // TILE)
        sequence = np.repeat(np.arange(len(tiles)), tiles)
        first = (np.arange(len(sequence)) - np.repeat(tiles.cumsum() - tiles, tiles)) * TILE
        offset = first[:, None] + np.arange(TILE)
        is_query = offset < query_lens[sequence, None]  # [tiles, TILE], as is the rest
        positions = np.where(is_query, (seq_lens - query_lens)[sequence, None] + offset, -1)
        tokens = np.where(is_query, starts[sequence, None] + offset, 0)
        num_blocks = -(-(positions.max(axis=1) + 1) // self.spec.block_size)
        arrays = (tokens.ravel(), np.flatnonzero(is_query), positions.ravel(), sequence, num_blocks.astype(np.int32))
        self.tokens, self.places, *tiled = upload(arrays, self.spec.device)
        self._draw_masks(metadata.block_table, *tiled)

    def _draw_masks(self, block_table: Tensor, positions: Tensor, sequence: Tensor, num_blocks: Tensor) -> None:
        """positions [tiles * TILE]; of each tile its sequence and its number of key blocks."""
        place_of, block_size = self._place_of(block_table), self.spec.block_size
        sequence_of_query = sequence.repeat_interleave(TILE)
        listed = block_table.new_zeros(len(sequence), self.cache.num_blocks)
        listed[:, : block_table.shape[1]] = block_table[sequence]
        self.masks = {
            window: BlockMask.from_kv_blocks(
                num_blocks[None, None],
                listed[None, None],
                BLOCK_SIZE=(TILE, block_size),
                mask_mod=_visible(place_of, sequence_of_query, positions, block_size, limit),
                seq_lengths=(len(positions), self.cache.num_blocks * block_size),
                compute_q_blocks=False,
            )
            for window, limit in self.windows.items()
        }

    def _place_of(self, block_table: Tensor) -> Tensor:
        """int32 [num_seqs, num_blocks]. Block 0, which pads the tables, stands behind all that a query sees."""
        num_seqs, width = block_table.shape
        place_of = block_table.new_full((num_seqs, self.cache.num_blocks), -1)
        places = torch.arange(width, dtype=torch.int32, device=block_table.device)
        return place_of.scatter_(1, block_table.long(), places.expand(num_seqs, -1))

    def forward(self, layer: int, q: Tensor) -> Tensor:
        spec = self.spec
        keys, values = (x[layer].flatten(0, 1).transpose(0, 1)[None] for x in (self.cache.keys, self.cache.values))
        out = _compiled(spec.device.type)(
            q.index_select(0, self.tokens).transpose(0, 1)[None],
            keys,
            values,
            score_mod=self.score_mod,
            block_mask=self.masks[spec.windows[layer]],
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            kernel_options=self.kernel_options,
        )
        return out[0].transpose(0, 1).index_select(0, self.places)


def _visible(
    place_of: Tensor, sequence: Tensor, positions: Tensor, block_size: int, window: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key: by the query's index among the padded ones, and by the key's cache slot."""

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        place = place_of[sequence[query], slot // block_size]
        distance = positions[query] - (place * block_size + slot % block_size)
        return (place >= 0) & (distance >= 0) & (distance < window)

    return mask_mod


def _capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _kernel_options(block_size: int) -> dict[str, Any]:
    """One kernel for all steps, with tiles that divide those of the mask; torch's own choice may not."""
    keys = next(keys for keys in (64, 32, 16) if block_size % keys == 0)
    return {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": TILE, "BLOCK_N": keys}


@cache
def _compiled(device_type: str) -> Callable[..., Any]:
    """On a CPU, where compiling takes longer than all that is computed here, the plain operations."""
    return torch.compile(flex_attention, backend="inductor" if device_type == "cuda" else "eager")
