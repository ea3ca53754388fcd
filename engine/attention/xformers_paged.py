"""xformers: its split-key kernel for decodes, memory-efficient attention over copied keys for all other rows.

    rows of a step         | decodes: one query each        | chunks of prompts
    keys and values        | read from the paged cache      | copied out of it, sequence behind sequence
    operator               | triton_splitk                  | what its dispatcher finds: FlashAttention 2 in torch
    causality              | the query sees all keys        | counted from each sequence's last query and key
    sliding window         | keys from max(0, len - window) | as causality

Neither knows soft-caps or 8-bit caches. How a decode's keys are split depends on the longest sequence of the step.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import triton
from torch import Tensor

from engine.transfer import upload

from .metadata import AttentionMetadata, AttentionSpec
from .paged import StoredBySlot

# Not for the log: its kernels are what they are, and the operators that were built for another torch are not needed.
warnings.filterwarnings("ignore", "tl.make_block_ptr is deprecated")
logging.getLogger("xformers").addFilter(lambda record: "can't load C++/CUDA extensions" not in record.getMessage())
from xformers.ops import fmha  # noqa: E402
from xformers.ops.fmha import attn_bias, triton_splitk  # noqa: E402

HEAD_DIMS = (16, 32, 64, 128, 256, 512)
KEYS_PER_SPLIT, MOST_SPLITS = 512, 32
LEAST_KEYS = 1024
"""The kernel is compiled anew for each number of rows and of keys; hence both are rounded up to powers of two."""
FIRST_TRITON_WITHOUT_BLOCK_POINTERS = (3, 9)


class XFormersAttention(StoredBySlot):
    name: ClassVar[str] = "xformers"
    captures_decode: ClassVar[bool] = True

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        reasons = []
        if tuple(map(int, triton.__version__.split(".")[:2])) >= FIRST_TRITON_WITHOUT_BLOCK_POINTERS:
            reasons.append(f"it does not run on triton {triton.__version__}, only below 3.9")
        if spec.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            reasons.append(f"it needs a CUDA device, not {spec.device.type}")
        if spec.device.type == "cuda" and spec.capability < (8, 0):
            reasons.append(f"it needs compute capability 8.0, not {'.'.join(map(str, spec.capability))}")
        if spec.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"it does not compute in {spec.dtype}")
        if spec.has_scales:
            reasons.append(f"it has no cache of {spec.cache_dtype}")
        if spec.softcap:
            reasons.append("it has no soft-cap")
        if spec.head_dim not in HEAD_DIMS:
            reasons.append(f"head_dim {spec.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}")
        if spec.block_size % 16:
            reasons.append(f"block_size {spec.block_size} is no multiple of 16")
        return reasons

    def prepare(self, metadata: AttentionMetadata) -> None:
        super().prepare(metadata)
        self.parts = list(self._parts(metadata))

    def _parts(self, metadata: AttentionMetadata) -> Iterator["_Decodes | _Chunks"]:
        query_lens = np.diff(metadata.host_query_start_loc)
        decodes, chunks = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
        if len(decodes):
            yield _Decodes(self.spec, metadata, decodes)
        if len(chunks):
            yield _Chunks(self.spec, metadata, chunks)

    def forward(self, layer: int, q: Tensor) -> Tensor:
        keys, values, window = self.cache.keys[layer], self.cache.values[layer], self.spec.windows[layer]
        if len(self.parts) == 1:
            return self.parts[0].attend(q, keys, values, window)
        out = torch.empty_like(q)
        for part in self.parts:
            out.index_copy_(0, part.tokens, part.attend(q.index_select(0, part.tokens), keys, values, window))
        return out


class _Decodes:
    """Rows of one query; their number n is rounded up to N, and the rows that this adds have no keys.

    Where all rows of the step are decodes, the metadata's tensors may change in place between two calls of `attend`:
    nothing that is derived from them is kept.
    """

    def __init__(self, spec: AttentionSpec, metadata: AttentionMetadata, rows: np.ndarray) -> None:
        self.spec, self.op = spec, _operator(spec.block_size)
        self.given = metadata.seq_lens, metadata.block_table
        if len(rows) < len(metadata.host_seq_lens):
            self.tokens, seqs = upload((metadata.host_query_start_loc[rows].astype(np.int64), rows), spec.device)
            self.given = metadata.seq_lens[seqs], metadata.block_table[seqs]
        n, num_blocks = self.given[1].shape
        num_rows = triton.next_power_of_2(n)
        num_blocks = triton.next_power_of_2(max(num_blocks, -(-LEAST_KEYS // spec.block_size)))
        self.seq_lens = _room(self.given[0], (num_rows,))  # int32 [N]
        self.block_table = _room(self.given[1], (num_rows, num_blocks))  # int32 [N, num_blocks]
        self.first_keys = {window: torch.zeros_like(self.seq_lens) for window in set(spec.windows)}
        self.masks = {window: self._mask(first_keys) for window, first_keys in self.first_keys.items()}

    def _mask(self, first_keys: Tensor) -> Any:
        """Keys from `first_keys` int32 [N] up to the last.

        By hand: the constructors read lists, copy them to the device, and one of them fails for any input.
        """
        unread = [0] * (len(first_keys) + 1)
        queries = attn_bias._SeqLenInfo(first_keys, max_seqlen=1, min_seqlen=1, seqstart_py=unread)
        keys = attn_bias._GappySeqInfo(first_keys, 0, 0, unread, seqlen=self.seq_lens, seqlen_py=unread)
        return attn_bias.PagedBlockDiagonalGappyKeysMask(queries, keys, self.block_table, self.spec.block_size)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """q [n, num_heads, head_dim]; keys and values as the cache has them."""
        for room, given in zip((self.seq_lens, self.block_table), self.given, strict=True):
            _fill(room, given)
        if window is not None:
            torch.sub(self.seq_lens, window, out=self.first_keys[window]).clamp_(min=0)
        queries = _fill(_room(q, (len(self.seq_lens), *q.shape[1:])), q)
        keys, values = (_grouped(x.flatten(0, 1), self.spec) for x in (keys, values))
        inputs = fmha.Inputs(_grouped(queries, self.spec), keys, values, self.masks[window], scale=self.spec.scale)
        out, _ = self.op.apply(inputs, needs_gradient=False)
        return out.view(queries.shape)[: len(q)]


class _Chunks:
    """Rows of several queries."""

    def __init__(self, spec: AttentionSpec, metadata: AttentionMetadata, rows: np.ndarray) -> None:
        self.spec = spec
        starts, seq_lens = metadata.host_query_start_loc, metadata.host_seq_lens[rows].astype(np.int64)
        query_lens = np.diff(starts)[rows].astype(np.int64)
        tokens = _ranges(starts[rows].astype(np.int64), query_lens)
        sequence, position = np.repeat(rows, seq_lens), _ranges(np.zeros_like(seq_lens), seq_lens)
        ends = [np.concatenate([[0], lens.cumsum()]).astype(np.int32) for lens in (query_lens, seq_lens)]
        self.tokens, row, token, *offsets = upload((tokens, sequence, position, *ends), spec.device)
        blocks = metadata.block_table[row, token // spec.block_size]
        self.slots = blocks * spec.block_size + token % spec.block_size  # int64 [keys]
        infos = [
            attn_bias._SeqLenInfo(tensor, int(lens.max()), int(lens.min()), end.tolist())
            for tensor, lens, end in zip(offsets, (query_lens, seq_lens), ends, strict=True)
        ]
        full = attn_bias.BlockDiagonalMask(*infos)
        self.masks = {
            window: full.make_local_attention_from_bottomright(window)
            if window
            else full.make_causal_from_bottomright()
            for window in set(spec.windows)
        }

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """q [queries, num_heads, head_dim]; keys and values as the cache has them."""
        keys, values = (_grouped(x.flatten(0, 1).index_select(0, self.slots), self.spec) for x in (keys, values))
        out = fmha.memory_efficient_attention_forward(
            _grouped(q, self.spec), keys, values, self.masks[window], scale=self.spec.scale
        )
        return out.view(q.shape)


@cache
def _operator(block_size: int) -> Any:
    """triton_splitk with tiles of keys that divide a block, and with splits that do not depend on the batch's size."""

    class SplitKeys(triton_splitk.FwOp):  # type: ignore[misc]  # xformers has no types
        BLOCK_N = next(keys for keys in (64, 32, 16) if block_size % keys == 0)
        MAX_BLOCK_M = 1  # rounds the rows of its workspace up, for nothing

        @classmethod
        def get_split_k(cls, B: int, G: int, H: int, Mk: int, Mq: int, page_size: int, is_paged: bool = False) -> int:
            return min(MOST_SPLITS, Mk // KEYS_PER_SPLIT)

    return SplitKeys


def _grouped(x: Tensor, spec: AttentionSpec) -> Tensor:
    """[n, heads, head_dim] -> [1, n, num_kv_heads, heads per key head, head_dim]; keys repeat by a stride of 0."""
    grouped = x.view(1, len(x), spec.num_kv_heads, -1, spec.head_dim)
    return grouped.expand(-1, -1, -1, spec.num_heads // spec.num_kv_heads, -1)


def _room(given: Tensor, shape: tuple[int, ...]) -> Tensor:
    """For `given` and more rows or columns: zeros, or itself where there are no more."""
    return given if given.shape == shape else given.new_zeros(shape)


def _fill(room: Tensor, given: Tensor) -> Tensor:
    if room is not given:
        room[tuple(slice(length) for length in given.shape)].copy_(given)
    return room


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of each, one range behind the other."""
    return np.arange(lengths.sum()) + np.repeat(starts - (lengths.cumsum() - lengths), lengths)
