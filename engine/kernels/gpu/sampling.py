"""Steps 4 to 7 of engine/sampler.py on NVIDIA GPUs: the token of each row from its logits, without waiting.

    vocabulary   | chunk 0                  | chunk 1                  | ...      a program each, for every row
                 | group | group | group | …| group | …                           each with its greatest logit

greedy           greatest logits of groups -> the row's (one reading of the logits)
a temperature    then the chunks' weights -> the chunk in which u falls, and the token in it (a second reading)
top_k, top_p     between the two: candidates collected (a third reading) -> the exact bound, searched among them

Weights are float32 fractions of the likeliest token's. They are summed as integers, multiples of 2**-42: such sums are
exact in any order, so that neither atomic additions nor the number of programs can change a token. What weighs less
than 2**-42 is never drawn.

Bounds are searched for by their bits, three at a time, among few candidates if they provably hold the answer: for a
small top_k, what is no less than the k-th of the groups' greatest; otherwise what weighs LIKELY or more, but no less
than nearly all groups' greatest. Where they do not hold it (top_p of a flat distribution, a large top_k), one program
searches the whole row, which it reads ten times for each bound.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.ops import TokenChoice
from engine.kernels.torch_sampling import LOWEST_TEMPERATURE
from engine.transfer import upload

CHUNK = 4096
"""Vocabulary ids of a program."""
GROUP = 128
"""Ids of which only the greatest logit is kept: enough groups for usual top_k, few enough for one program."""
CAPACITY = 8192
"""Candidates that a row has room for."""
TILE = 1024
"""Candidates that a program weighs at once."""

UNIT = tl.constexpr(2.0**42)
"""Integer weight of the likeliest token: the sum over a vocabulary of 2**20 is below 2**62."""
LEAST = 2.0**-42
LIKELY = tl.constexpr(2.0**-16)


def choose_tokens(logits: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
    """See `Ops.choose_tokens`; the logits are left as they are, and ids are below the vocabulary's size always."""
    rows, vocab = logits.shape
    assert logits.is_contiguous(), logits.stride()
    assert logits.dtype == torch.float32, logits.dtype
    num_groups, device = triton.cdiv(vocab, GROUP), logits.device
    maxima = torch.empty(rows, num_groups, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    highest = torch.empty(rows, dtype=torch.float32, device=device)
    groups_kernel[(rows, triton.cdiv(vocab, CHUNK))](
        logits, maxima, vocab, num_groups, GROUPS=CHUNK // GROUP, GROUP=GROUP, num_warps=4
    )
    greedy_kernel[(rows,)](
        *(logits, maxima, tokens, highest, vocab, num_groups),
        GROUPS=triton.next_power_of_2(num_groups),
        GROUP=GROUP,
        num_warps=4,
    )
    drawing = np.flatnonzero(choice.temperature > 0)
    if len(drawing):
        _draw(logits, maxima, highest, choice, drawing, tokens)
    return tokens, highest


def _draw(
    logits: Tensor, maxima: Tensor, highest: Tensor, choice: TokenChoice, drawing: np.ndarray, tokens: Tensor
) -> None:
    """Replace the tokens of the rows `drawing`, int64, by drawn ones."""
    vocab, device = logits.shape[1], logits.device
    num_chunks = triton.cdiv(vocab, CHUNK)
    is_limited = (choice.top_k > 0) & (choice.top_k < vocab) | (choice.top_p < 1)
    limited = drawing[is_limited[drawing]]
    scale = (np.log2(np.e) / np.maximum(choice.temperature, LOWEST_TEMPERATURE)).astype(np.float32)
    bound = np.maximum(choice.min_p, np.float32(LEAST))
    arrays = (drawing, limited, scale, bound, choice.top_k, choice.top_p, choice.u)
    drawing_, limited_, scale_, bound_, top_k, top_p, u = upload(arrays, device)
    if len(limited):
        low = torch.empty(len(limited), dtype=torch.float32, device=device)
        count = torch.empty(len(limited), dtype=torch.int32, device=device)
        found = torch.empty(len(limited), CAPACITY, dtype=torch.float32, device=device)
        sums = torch.empty(2, len(limited), num_chunks, dtype=torch.int64, device=device)
        low_kernel[(len(limited),)](
            *(maxima, highest, limited_, scale_, bound_, top_k, low, count, maxima.shape[1], vocab),
            TILE=TILE,
            num_warps=8,
        )
        collect_kernel[(len(limited), num_chunks)](
            *(logits, highest, limited_, scale_, bound_, low, found, count, sums[0], sums[1], vocab),
            CHUNK=CHUNK,
            CAPACITY=CAPACITY,
            num_warps=8,
        )
        bound_kernel[(len(limited),)](
            *(logits, highest, limited_, scale_, bound_, top_k, top_p, low, found, count, sums[0], sums[1], vocab),
            CHUNKS=num_chunks,
            BLOCK=triton.next_power_of_2(num_chunks),
            CAPACITY=CAPACITY,
            TILE=TILE,
            num_warps=16,
        )
    weights = torch.empty(len(drawing), num_chunks, dtype=torch.int64, device=device)
    sums_kernel[(len(drawing), num_chunks)](
        logits, highest, drawing_, scale_, bound_, weights, vocab, CHUNK=CHUNK, num_warps=8
    )
    pick_kernel[(len(drawing),)](
        *(logits, highest, drawing_, scale_, bound_, u, weights, tokens, vocab),
        CHUNK=CHUNK,
        CHUNKS=num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )


@triton.jit
def _weights(x, highest, scale):
    """Nothing here can be fused with what is around it: a weight has the same bits in every kernel."""
    return tl.exp2((x - highest) * scale)


@triton.jit
def _units(weights):
    return (weights * UNIT).to(tl.int64)


@triton.jit
def _greatest(highest, row, count):
    """The row's greatest logit, and `count`; 0 and 0 if its logits are not numbers: none of them is looked at."""
    greatest = tl.load(highest + row)
    is_number = tl.abs(greatest) < float("inf")
    return tl.where(is_number, greatest, 0.0), tl.where(is_number, count, 0)


@triton.jit
def groups_kernel(logits, maxima, vocab, num_groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """maxima [rows, num_groups]: the greatest logit of each group, NaN if it holds one."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=-float("inf"))
    has_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    best = tl.where(has_nan, float("nan"), tl.max(x, axis=1))
    tl.store(maxima + row * num_groups + group, best, mask=group < num_groups)


@triton.jit
def greedy_kernel(logits, maxima, tokens, highest, vocab, num_groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """The greatest logit of one row, and the lowest id that has it; GROUPS >= num_groups."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    best = tl.load(maxima + row * num_groups + group, mask=group < num_groups, other=-float("inf"))
    has_nan = tl.max((best != best).to(tl.int32), axis=0) > 0
    greatest = tl.where(has_nan, float("nan"), tl.max(best, axis=0))
    first = tl.min(tl.where(best == greatest, group, GROUPS), axis=0)
    ids = first * GROUP + member
    x = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("nan"))
    token = tl.min(tl.where(x == greatest, ids, vocab), axis=0)
    tl.store(tokens + row, tl.where(token < vocab, token, 0).to(tl.int64))
    tl.store(highest + row, greatest)


@triton.jit
def _reach(values, count, highest, scale, target, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """Bits of the greatest bound for which the logits values[:count] of that weight or more are `target` in number, or
    weigh it; 0 if all of them are not or do not."""
    lane, step = tl.arange(0, TILE), tl.arange(0, 8)
    bound = 0
    for digit in range(10):  # of three bits; weights are at most 1, below 2**30 as bits, and sorted by them
        shift = 27 - 3 * digit
        pivots = bound + (step << shift)
        reached = tl.zeros([TILE, 8], tl.int64)
        for start in tl.range(0, count, TILE, num_stages=2):
            place = start + lane
            x = tl.load(values + place, mask=place < count, other=-float("inf"))
            weights = _weights(x, highest, scale)
            measure = _units(weights) if BY_WEIGHT else (place < count).to(tl.int64)
            reached += tl.where(weights.to(tl.int32, bitcast=True)[:, None] >= pivots[None, :], measure[:, None], 0)
        is_reached = (tl.sum(reached, axis=0) >= target) & (step > 0)
        bound += tl.sum(is_reached.to(tl.int32), axis=0) << shift
    return bound


@triton.jit
def low_kernel(maxima, highest, limited, scale, bound, top_k, low, count, num_groups, vocab, TILE: tl.constexpr):
    """low [limited]: the weight from which on a row's candidates are collected."""
    entry = tl.program_id(0)
    row = tl.load(limited + entry)
    greatest, length = _greatest(highest, row, num_groups)
    k = tl.load(top_k + row)
    is_small = (k > 0) & (k <= num_groups) & (k < vocab)
    most = tl.where(is_small, k, (num_groups * 15 + 15) // 16)
    bits = _reach(maxima + row * num_groups, length, greatest, tl.load(scale + row), most, False, TILE)
    least = bits.to(tl.float32, bitcast=True)
    least = tl.where(is_small, least, tl.maximum(least, LIKELY))
    tl.store(low + entry, tl.maximum(least, tl.load(bound + row)))
    tl.store(count + entry, 0)


@triton.jit
def collect_kernel(
    logits,
    highest,
    limited,
    scale,
    bound,
    low,
    found,
    count,
    sums,
    low_sums,
    vocab,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """One chunk: found [limited, CAPACITY], in any order, gets logits whose weight is `low` or more.

    sums and low_sums [limited, chunks]: what the ids above `bound`, and those above `low`, weigh together.
    """
    entry, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(limited + entry)
    greatest, length = _greatest(highest, row, vocab)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab + ids, mask=ids < length, other=-float("inf"))
    weights = _weights(x, greatest, tl.load(scale + row))
    units = _units(weights)
    tl.store(sums + entry * tl.num_programs(1) + chunk, tl.sum(tl.where(weights >= tl.load(bound + row), units, 0)))
    is_found = weights >= tl.load(low + entry)
    tl.store(low_sums + entry * tl.num_programs(1) + chunk, tl.sum(tl.where(is_found, units, 0)))
    place = tl.cumsum(is_found.to(tl.int32), axis=0)
    first = tl.atomic_add(count + entry, tl.max(place, axis=0))
    place += first - 1
    tl.store(found + entry.to(tl.int64) * CAPACITY + place, x, mask=is_found & (place < CAPACITY))


@triton.jit
def bound_kernel(
    logits,
    highest,
    limited,
    scale,
    bound,
    top_k,
    top_p,
    low,
    found,
    count,
    sums,
    low_sums,
    vocab,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raise one row's bound, min_p, to what top_k and then top_p leave."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(limited + entry)
    greatest, length = _greatest(highest, row, vocab)
    factor, lowest = tl.load(scale + row), tl.load(bound + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    chunk = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(sums + entry * CHUNKS + chunk, mask=chunk < CHUNKS, other=0), axis=0)
    low_total = tl.sum(tl.load(low_sums + entry * CHUNKS + chunk, mask=chunk < CHUNKS, other=0), axis=0)
    has_k, num_found = (k > 0) & (k < vocab), tl.load(count + entry)
    is_enough = tl.where(has_k, num_found >= k, low_total >= _share(total, p)) | (tl.load(low + entry) <= lowest)
    is_enough &= num_found <= CAPACITY
    values = logits + row * vocab
    if is_enough:
        values = found + entry * CAPACITY
        length = num_found
    if has_k:
        bits = _reach(values, length, greatest, factor, k, False, TILE)
        lowest = tl.maximum(lowest, bits.to(tl.float32, bitcast=True))
        total = _sum_from(lowest, values, length, greatest, factor, TILE)
    if p < 1:
        bits = _reach(values, length, greatest, factor, _share(total, p), True, TILE)
        lowest = tl.maximum(lowest, bits.to(tl.float32, bitcast=True))
    tl.store(bound + row, lowest)


@triton.jit
def _share(total, p):
    """The least integer of at least p * total, and at least 1."""
    exact = total.to(tl.float64) * p
    below = exact.to(tl.int64)
    return tl.maximum(tl.minimum(below + (below.to(tl.float64) < exact).to(tl.int64), total), 1)


@triton.jit
def _sum_from(least, values, count, highest, scale, TILE: tl.constexpr):
    """What the logits values[:count] of weight `least` or more weigh together; least > 0."""
    lane = tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.int64)
    for start in tl.range(0, count, TILE, num_stages=2):
        place = start + lane
        x = tl.load(values + place, mask=place < count, other=-float("inf"))
        weights = _weights(x, highest, scale)
        sums += tl.where(weights >= least, _units(weights), 0)
    return tl.sum(sums, axis=0)


@triton.jit
def sums_kernel(logits, highest, drawing, scale, bound, sums, vocab, CHUNK: tl.constexpr):
    """sums [drawing, chunks]: what the ids of a chunk weigh that `bound` leaves."""
    entry, chunk = tl.program_id(0), tl.program_id(1)
    units = _kept_units(logits, highest, tl.load(drawing + entry), scale, bound, chunk, vocab, CHUNK)
    tl.store(sums + entry * tl.num_programs(1) + chunk, tl.sum(units, axis=0))


@triton.jit
def pick_kernel(
    logits,
    highest,
    drawing,
    scale,
    bound,
    u,
    sums,
    tokens,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's first id with which the sum of weights exceeds u * total: never one of weight 0, since u < 1."""
    entry = tl.program_id(0)
    row = tl.load(drawing + entry)
    chunk = tl.arange(0, BLOCK)
    weights = tl.load(sums + entry * CHUNKS + chunk, mask=chunk < CHUNKS, other=0)
    total = tl.sum(weights, axis=0)
    target = tl.minimum((total.to(tl.float64) * tl.load(u + row)).to(tl.int64), total - 1)
    chosen = tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
    target -= tl.sum(tl.where(chunk < chosen, weights, 0), axis=0)
    units = _kept_units(logits, highest, row, scale, bound, chosen, vocab, CHUNK)
    place = tl.sum((tl.cumsum(units, axis=0) <= target).to(tl.int32), axis=0)
    tl.store(tokens + row, (chosen * CHUNK + place).to(tl.int64))


@triton.jit
def _kept_units(logits, highest, row, scale, bound, chunk, vocab, CHUNK: tl.constexpr):
    """Integer weights of one chunk of a row, 0 where they are below its bound; all 0 if the row's logits are not
    numbers."""
    greatest, length = _greatest(highest, row, vocab)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * vocab + ids, mask=ids < length, other=-float("inf"))
    weights = _weights(x, greatest, tl.load(scale + row))
    return tl.where(weights >= tl.load(bound + row), _units(weights), 0)
