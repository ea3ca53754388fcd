"""Stored bytes, of floats or of GGUF's blocks -> weights of 8 or 4 bits."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from configs.errors import CheckpointError
from engine.checkpoints import StoredTensor
from engine.kernels.quantised import GROUP_SIZE, QuantisedWeight

from .dequantise import chunks, dequantise, stored_rows
from .gguf_blocks import Floats, Groups, merge_pairs, unpack
from .precision import BITS
from .staging import IN_PLACE, Placement

SHRINKS = (0.0, 0.03, 0.06, 0.09)
"""Parts of a group's range that a candidate cuts off at both ends, to have smaller steps in between."""

ELEMENTS_AT_ONCE = 131072
"""Converted at a time: the arrays stay in the cache, and the threads seldom wait for each other's Python."""


def read_quantised(
    parts: Sequence[StoredTensor], forms: Sequence[str], placement: Placement = IN_PLACE
) -> QuantisedWeight:
    """The rows of all parts, one below the other, each in its form of `BITS`; parts of 4 bits beside 8 count as 8.

    Scales and minima become float16: exact for GGUF's types of one scale per block, a relative 2**-11 for Q4_K and
    Q5_K; for Q6_K see `merge_pairs`. Raises CheckpointError where float16 ends or a weight is not finite.
    """
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    q = torch.empty(rows, columns, dtype=torch.uint8, device=placement.device)
    scale, minimum = (q.new_empty(rows, columns // GROUP_SIZE, dtype=torch.float16) for _ in range(2))
    begin = 0
    for part, form in zip(parts, forms, strict=True):
        own = slice(begin, begin + part.shape[0])
        begin = own.stop
        for piece, hosts in placement.pieces(*((out[own], out.dtype) for out in (q, scale, minimum))):
            arrays = [host.numpy() for host in hosts]
            with np.errstate(all="ignore"):
                for place, groups in _groups(part, form, piece):
                    triple: tuple[np.ndarray, ...] = groups
                    for out, values in zip(arrays, triple, strict=True):
                        out[place] = values.reshape(out[place].shape)
            if not all(np.isfinite(array).all() for array in arrays[1:]):
                raise CheckpointError(
                    f"{part.file}: tensor {part.stored_name}: a weight is not finite, or too large to be quantised; "
                    "--quantization none takes it as it is"
                )
    return QuantisedWeight(max(BITS[form] for form in forms), q, scale, minimum)


def _groups(stored: StoredTensor, form: str, piece: slice) -> Iterator[tuple[slice, Groups]]:
    """Rows of the piece and their groups of 32."""
    for own, rows in chunks(stored, piece, ELEMENTS_AT_ONCE):
        if form != stored.dtype:
            yield own, quantise(dequantise(stored, rows), BITS[form])
            continue
        groups = unpack(stored_rows(stored, rows), form)
        yield own, merge_pairs(groups) if form == "Q6_K" else groups


def quantise(values: Floats, bits: int) -> Groups:
    """Groups of 32 of an array of any shape; scales and minima are float16 numbers.

    With 8 bits the steps are symmetric around 0, which costs a product less time than a minimum does: for normally
    distributed weights a root mean square error of 0.54 %. With 4 bits each candidate range gives values of q, these
    give the scale and the minimum of least squared error, and the best of the candidates stays: 7.3 % instead of the
    7.8 % of steps from the lowest to the highest value. Steps below float16's smallest (6e-8) vanish.
    """
    levels = 2**bits - 1
    x = values.reshape(-1, GROUP_SIZE).T.copy()  # [32, groups]: sums over a group are sums of vectors
    if bits == 8:
        scale = _half(np.abs(x).max(0) / 127)
        minimum = -128 * scale
    else:
        minimum = x.min(0)
        scale = (x.max(0) - minimum) / levels
        offset, factor = _least_squares((x - minimum) * _inverse(scale), levels)
        scale, minimum = _half(scale * factor), _half(minimum + scale * offset)
    x -= minimum
    x *= _inverse(scale)
    return Groups(_nearest(x, levels).astype(np.uint8).T.copy(), scale[:, None], minimum[:, None])


def _least_squares(x: Floats, levels: int) -> tuple[Floats, Floats]:
    """x [32, groups] from 0 to `levels` -> the offset and the factor of the steps, each [groups]."""
    n, sum_x, q, product = len(x), x.sum(0), np.empty_like(x), np.empty_like(x)
    best = offset = factor = np.zeros_like(sum_x)
    for shrink in SHRINKS:
        np.subtract(x, shrink * levels, out=q)
        q *= 1 / (1 - 2 * shrink)
        sum_q = _nearest(q, levels).sum(0)
        sum_qq, sum_qx = (np.multiply(q, other, out=product).sum(0) for other in (q, x))
        slope = (n * sum_qx - sum_q * sum_x) * _inverse(n * sum_qq - sum_q * sum_q)
        start = (sum_x - slope * sum_q) / n
        gain = slope * sum_qx + start * sum_x  # the squared error is the sum of x * x without it
        better = gain > best
        best, offset, factor = (np.where(better, *pair) for pair in ((gain, best), (start, offset), (slope, factor)))
    return offset, factor


def _half(x: Floats) -> Floats:
    """x, rounded to float16."""
    return x.astype(np.float16).astype(np.float32)


def _nearest(x: Floats, levels: int) -> Floats:
    """In place: the nearest whole number from 0 to `levels`."""
    np.rint(x, out=x)
    return np.clip(x, 0, levels, out=x)


def _inverse(x: Floats) -> Floats:
    """1 / x, and 0 for 0."""
    return np.divide(1, x, out=np.zeros_like(x), where=x != 0)
