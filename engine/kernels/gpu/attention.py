"""Attention over the paged cache, and the kernel that fills it.

A key head serves a group of query heads, whose rows are computed together: a block of rows is some neighbouring queries
of one sequence, each times its group. Keys pass in tiles, with a running maximum and sum (online softmax, arXiv
2205.14135), in powers of 2. Two kernels share the loop over tiles:

    several queries in the step    one program for each block of rows and key head
    one query in the step          keys are cut into splits, whose sums another kernel puts together

    positions   0            first seen                   seq_len
    tiles       |......|......|==:===|======|======|======|===:   aligned to their size; a window skips some
    splits                    |   split 0   |   split 1   |        whole tiles, at least MIN_SPLIT positions

How a sequence is cut depends on itself and on the engine, never on its batch: its bits do not depend on the batch.

q, out        [num_tokens, num_heads, head_dim]; a token's heads are contiguous, tokens are `q_rows` heads apart
keys, values  [num_slots, num_kv_heads, head_dim]; slot = block id * block size + offset
scales        float32 [num_slots, num_kv_heads], or None
D             head_dim, padded to a power of two
"""

import triton
import triton.language as tl

from .language import LOG2_E, dot, store_vectors, widen

MIN_SPLIT = tl.constexpr(256)
"""Positions."""

LOWEST = tl.constexpr(-1.0e30)
"""A running maximum of nothing. Finite: rows that see no key of a tile compute no inf - inf."""


@triton.jit
def _load(pointers, is_token, is_element, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Keys or values, 0 where they are none: what a block held before may be NaN."""
    if MASKED:
        x = tl.load(pointers, mask=is_token & is_element, other=0.0)
    elif PADDED:
        x = tl.load(pointers, mask=is_element, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def _block(blocks, first, seq_len, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Block ids of the tile at position `first`: one where the tile lies in one block, else [TILE]."""
    place = first if BLOCK_SIZE % TILE == 0 else first + tl.arange(0, TILE)
    return tl.load(blocks + tl.minimum(place, seq_len - 1) // BLOCK_SIZE)


@triton.jit
def _attend(
    q,  # [rows, D]
    last_seen,  # int32 [rows]
    maximum,  # float32 [rows]
    total,  # float32 [rows]
    acc,  # float32 [rows, D]
    keys,  # from here on of this key head
    values,
    key_scales,
    value_scales,
    blocks,  # int32: the sequence's
    begin,  # a multiple of TILE
    end,
    seq_len,
    MASKED: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Positions [begin, end) into maximum, total and acc. Where not MASKED, every row sees all of their tiles."""
    D: tl.constexpr = q.shape[1]
    TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    # What is exponentiated, to the base of 2, are scores times this.
    FACTOR: tl.constexpr = 1.0 if SOFTCAP > 0.0 else SCALE * LOG2_E
    # Probabilities times scales may be too small for float16.
    TYPE: tl.constexpr = tl.bfloat16 if value_scales is not None and q.dtype == tl.float16 else q.dtype
    d = tl.arange(0, D)
    is_element = d < HEAD_DIM
    next_block = _block(blocks, begin, seq_len, BLOCK_SIZE, TILE)
    for first in range(begin, end, TILE):
        place = first + tl.arange(0, TILE)
        is_token = place < seq_len
        # Looked up a tile ahead, so that copies of keys and values wait for nothing.
        block = next_block.to(tl.int64) * BLOCK_SIZE
        next_block = _block(blocks, first + TILE, seq_len, BLOCK_SIZE, TILE)
        if BLOCK_SIZE % TILE == 0:
            base = block + first % BLOCK_SIZE
            slots = tl.arange(0, TILE)
        else:
            base = tl.zeros([], tl.int64)
            slots = block + place % BLOCK_SIZE
        token = (slots * TOKEN)[:, None] + d[None, :]
        k = _load(keys + base * TOKEN + token, is_token[:, None], is_element[None, :], MASKED, HEAD_DIM < D)
        scores = dot(q, tl.trans(widen(k, q.dtype)), tl.zeros([q.shape[0], TILE], tl.float32))
        if key_scales is not None:
            scores *= _load(key_scales + (base + slots) * NUM_KV_HEADS, is_token, True, MASKED, False)[None, :]
        if SOFTCAP > 0.0:  # tanh(x) = 1 - 2 / (1 + exp(2x)), in powers of 2 as all that follows
            doubled = scores * (2.0 * LOG2_E * SCALE / SOFTCAP)
            scores = SOFTCAP * LOG2_E - 2.0 * SOFTCAP * LOG2_E / (1.0 + tl.exp2(doubled))
        if MASKED:
            visible = place[None, :] <= last_seen[:, None]
            if WINDOW > 0:
                visible &= place[None, :] > last_seen[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * FACTOR)
        p = tl.exp2(scores * FACTOR - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(p, 1)
        if value_scales is not None:
            p *= _load(value_scales + (base + slots) * NUM_KV_HEADS, is_token, True, MASKED, False)[None, :]
        v = _load(values + base * TOKEN + token, is_token[:, None], is_element[None, :], MASKED, HEAD_DIM < D)
        acc = dot(p.to(TYPE), widen(v, TYPE), acc * shrink[:, None])
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _sequence_of(query_start_loc, block, num_seqs, BLOCK: tl.constexpr):
    """The sequence of a block of queries, and the block's number in it.

    Sequence s has numbers from query_start_loc[s] // BLOCK + s on: at least as many as it has blocks.
    """
    before = 0
    for first in range(0, num_seqs, 256):
        seq = first + tl.arange(0, 256)
        start = tl.load(query_start_loc + seq, mask=seq < num_seqs, other=0) // BLOCK + seq
        before += tl.sum(((start <= block) & (seq < num_seqs)).to(tl.int32))
    seq = before - 1
    return seq, block - (tl.load(query_start_loc + seq) // BLOCK + seq)


@triton.jit(do_not_specialize=["num_seqs", "q_rows", "blocks_per_seq"])
def attend_blocks(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    query_start_loc,  # int32 [num_seqs + 1]
    seq_lens,  # int32 [num_seqs]
    block_table,  # int32 [num_seqs, blocks_per_seq]
    num_seqs,
    q_rows,
    blocks_per_seq,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sequences with several queries. Grid: [num_tokens // (ROWS // GROUP) + num_seqs, NUM_KV_HEADS]"""
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last blocks of a sequence see most keys: they start first.
    seq, block = _sequence_of(query_start_loc, tl.num_programs(0) - 1 - tl.program_id(0), num_seqs, QUERIES)
    kv_head = tl.program_id(1)
    start = tl.load(query_start_loc + seq)
    num_queries = tl.load(query_start_loc + seq + 1) - start
    first_query = block * QUERIES
    if (num_queries == 1) | (first_query >= num_queries):
        return
    seq_len = tl.load(seq_lens + seq)
    row = tl.arange(0, ROWS)
    query = row // GROUP
    d = tl.arange(0, D)
    is_stored = ((query < QUERIES) & (first_query + query < num_queries))[:, None] & (d < HEAD_DIM)[None, :]
    token = (start + first_query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    element = ((query * q_rows + head) * HEAD_DIM)[:, None] + d[None, :]
    rows = tl.load(q + token * q_rows * HEAD_DIM + element, mask=is_stored, other=0.0)
    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)

    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    # Part 0 is begin to all_from, 1 is what all rows see, 2 is all_to to end.
    first_place = seq_len - num_queries + first_query
    end = tl.minimum(first_place + QUERIES, seq_len)
    begin = tl.maximum(first_place + 1 - WINDOW, 0) // TILE * TILE if WINDOW > 0 else 0
    all_from = tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE if WINDOW > 0 else 0
    all_to = (first_place + 1) // TILE * TILE
    last_seen = tl.minimum(first_place + query, seq_len - 1)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        maximum, total, acc = _attend(
            rows, last_seen, maximum, total, acc, keys, values, key_scales, value_scales,
            block_table + seq.to(tl.int64) * blocks_per_seq,
            begin if part == 0 else all_from if part == 1 else tl.maximum(all_from, all_to),
            tl.minimum(all_from, end) if part == 0 else all_to if part == 1 else end,
            seq_len, part != 1, SCALE, SOFTCAP, WINDOW, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip

    attended = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    element = ((query * NUM_KV_HEADS * GROUP + head) * HEAD_DIM)[:, None] + d[None, :]
    out += token * (NUM_KV_HEADS * GROUP * HEAD_DIM)
    tl.store(out + element, attended.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _splits(seq_len, WINDOW: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Where the first split of a sequence with one query begins, positions in each, and their number."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(seq_len - WINDOW, 0) // TILE * TILE
    tiles = tl.cdiv(tl.cdiv(seq_len - begin, TILE), NUM_SPLITS)
    size = tl.maximum(tiles * TILE, MIN_SPLIT)
    return begin, size, tl.cdiv(seq_len - begin, size)


@triton.jit(do_not_specialize=["q_rows", "blocks_per_seq"])
def attend_splits(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    accs,  # float32 [num_seqs, num_heads, NUM_SPLITS, D]
    sums,  # float32 [2, num_seqs, num_heads, NUM_SPLITS]: maxima, totals
    query_start_loc,
    seq_lens,
    block_table,
    q_rows,
    blocks_per_seq,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Sequences with one query. Grid: [NUM_KV_HEADS, programs, num_seqs]; a program takes every so many-th split."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(2)
    token = tl.load(query_start_loc + seq)
    if tl.load(query_start_loc + seq + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    begin, size, num_splits = _splits(seq_len, WINDOW, TILE, NUM_SPLITS)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    head = kv_head * GROUP + row
    is_head = row < GROUP
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    if key_scales is not None:
        key_scales += kv_head
        value_scales += kv_head
    blocks = block_table + seq.to(tl.int64) * blocks_per_seq
    last_seen = tl.zeros([ROWS], tl.int32) + (seq_len - 1)
    part = (seq.to(tl.int64) * NUM_KV_HEADS * GROUP + head) * NUM_SPLITS
    num_parts = tl.num_programs(2).to(tl.int64) * NUM_KV_HEADS * GROUP * NUM_SPLITS
    for split in range(tl.program_id(1), num_splits, tl.num_programs(1)):
        element = (head * HEAD_DIM)[:, None] + d[None, :]
        rows = tl.load(
            q + token.to(tl.int64) * q_rows * HEAD_DIM + element,
            mask=is_head[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        maximum, total, acc = _attend(
            rows, last_seen,
            tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32),
            keys, values, key_scales, value_scales, blocks,
            begin + split * size, tl.minimum(begin + (split + 1) * size, seq_len), seq_len, True,
            SCALE, SOFTCAP, WINDOW, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
        tl.store(accs + ((part + split) * D)[:, None] + d[None, :], acc, mask=is_head[:, None])
        tl.store(sums + part + split, maximum, mask=is_head)
        tl.store(sums + num_parts + part + split, total, mask=is_head)


@triton.jit
def add_splits(
    accs,
    sums,
    out,
    query_start_loc,
    seq_lens,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """What `attend_splits` left. Grid: [num_heads, num_seqs]. A sequence of length 0 has zeros."""
    seq = tl.program_id(1)
    token = tl.load(query_start_loc + seq)
    if tl.load(query_start_loc + seq + 1) - token != 1:
        return
    _, _, num_splits = _splits(tl.load(seq_lens + seq), WINDOW, TILE, NUM_SPLITS)
    split = tl.arange(0, NUM_SPLITS)
    d = tl.arange(0, D)
    is_split = split < num_splits
    part = (seq.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * NUM_SPLITS + split
    num_parts = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * NUM_SPLITS
    maxima = tl.load(sums + part, mask=is_split, other=LOWEST)
    totals = tl.load(sums + num_parts + part, mask=is_split, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, 0))
    total = tl.sum(weights * totals, 0)
    acc = tl.load(accs + (part * D)[:, None] + d[None, :], mask=is_split[:, None], other=0.0)
    attended = tl.sum(weights[:, None] * acc, 0) / tl.where(total == 0.0, 1.0, total)
    out += (token.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * HEAD_DIM
    tl.store(out + d, attended.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=["k_rows", "v_rows"])
def store_kv(
    k,
    v,
    keys,
    values,
    key_scales,
    value_scales,
    slot_mapping,  # int64 [num_tokens]
    k_rows,
    v_rows,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """New tokens' k and v [num_tokens, NUM_KV_HEADS, HEAD_DIM] into their slots. Grid: [num_tokens]

    HEADS is NUM_KV_HEADS, padded to a power of two. A negative slot is skipped.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    is_stored = (head < NUM_KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    element = (head * HEAD_DIM)[:, None] + d[None, :]
    to = slot * NUM_KV_HEADS * HEAD_DIM + element
    if key_scales is not None:
        key_scales += slot * NUM_KV_HEADS + head
        value_scales += slot * NUM_KV_HEADS + head
    new = tl.load(k + token * k_rows * HEAD_DIM + element, mask=is_stored, other=0.0)
    store_vectors(new, keys + to, key_scales, is_stored, key_scales is not None)
    new = tl.load(v + token * v_rows * HEAD_DIM + element, mask=is_stored, other=0.0)
    store_vectors(new, values + to, value_scales, is_stored, value_scales is not None)
