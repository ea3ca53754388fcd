"""Steps 4 to 7 of engine/sampler.py in plain torch: the token of each row from its logits.

On a GPU it waits for the device where a nucleus may be wider than what top_p looks at first.
"""

import numpy as np
import torch
from torch import Tensor

from engine.transfer import upload

from .ops import TokenChoice

LOWEST_TEMPERATURE = 1e-30
"""Lower ones behave alike: the likeliest token. Keeps the division within float32."""

_CANDIDATES = 256  # likeliest tokens in which top_p looks first; a full sort takes several times as long
_CDF_BLOCK = 64  # vocabulary ids per step of the coarse CDF


def choose_tokens(logits: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
    """See `Ops.choose_tokens`."""
    highest, chosen = logits.max(dim=-1)  # NaN if the row holds one; the first of equals
    drawing = np.flatnonzero(choice.temperature > 0)
    if len(drawing):
        [index] = upload([drawing], logits.device)
        part = logits if len(drawing) == len(logits) else logits[index]
        chosen[index] = _draw(part, highest[index], choice.rows(drawing))
    return chosen, highest


def _draw(logits: Tensor, highest: Tensor, choice: TokenChoice) -> Tensor:
    """Token ids, int64 [rows], drawn from logits [rows, vocab], which are overwritten."""
    arrays = (np.maximum(choice.temperature, np.float32(LOWEST_TEMPERATURE)), choice.min_p, choice.u)
    temperature, min_p, u = upload(arrays, logits.device)
    weights = logits.sub_(highest[:, None]).div_(temperature[:, None]).exp_()
    if (choice.min_p > 0).any():
        weights.masked_fill_(weights < min_p[:, None], 0.0)
    rows, vocab = weights.shape
    limited = np.flatnonzero((choice.top_k > 0) & (choice.top_k < vocab) | (choice.top_p < 1))
    if len(limited):
        [index] = upload([limited], logits.device)
        part = weights if len(limited) == rows else weights[index]
        _keep_likeliest(part, choice.top_k[limited], choice.top_p[limited])
        if part is not weights:
            weights[index] = part
    return _inverse_cdf(weights, u)


def _keep_likeliest(weights: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> None:
    """Zero what top_k and top_p leave out of weights [rows, vocab], in place; top_k 0 and top_p 1 keep all."""
    vocab = weights.shape[1]
    top_k = np.where(top_k == 0, vocab, np.minimum(top_k, vocab))
    most = int(top_k[top_k < vocab].max(initial=_CANDIDATES if (top_p < 1).any() else 1))
    best = weights.topk(min(vocab, most)).values  # [rows, candidates], descending
    if (top_k < vocab).any():
        last, has_none = upload((np.minimum(top_k, best.shape[1]) - 1, top_k == vocab), weights.device)
        bound = best.gather(1, last[:, None]).masked_fill_(has_none[:, None], 0.0)
        weights.masked_fill_(weights < bound, 0.0)
    if (top_p < 1).any():
        share, has_none = upload((top_p, top_p == 1), weights.device)
        target = _blocks(weights).sum(2).sum(1, dtype=torch.float64) * share
        bound = _nucleus_bound(weights, best, target).masked_fill_(has_none, 0.0)
        weights.masked_fill_(weights < bound[:, None], 0.0)


def _nucleus_bound(weights: Tensor, best: Tensor, target: Tensor) -> Tensor:
    """The least weight in the smallest set of likeliest tokens that weighs `target` or more; float32 [rows].

    weights [rows, vocab], best [rows, candidates]: their greatest weights, descending; target float64 [rows].
    """
    sums = best.cumsum(1, dtype=torch.float64)
    place = (sums < target[:, None]).sum(1).clamp_(max=best.shape[1] - 1)
    bound = best.gather(1, place[:, None]).squeeze(1)
    short = sums[:, -1] < target
    if best.shape[1] < weights.shape[1] and bool(short.any()):
        rest = weights[short]
        bound[short] = _nucleus_bound(rest, _descending(rest), target[short])
    return bound


def _descending(weights: Tensor) -> Tensor:
    """Each row sorted. On a CPU numpy sorts plain values several times faster than torch, which moves indices too."""
    if weights.is_cpu:
        return torch.from_numpy(-np.sort(-weights.numpy(), axis=1))
    return weights.sort(1, descending=True).values


def _blocks(weights: Tensor) -> Tensor:
    """Weights [rows, vocab] as [rows, blocks, ids of the block], zeros at the end."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _CDF_BLOCK))
    return padded.view(len(weights), -1, _CDF_BLOCK)


def _inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """First id whose cumulative weight exceeds u * total: never one of weight 0, since u < 1.

    weights: float32 [rows, vocab], u: float64 [rows]. Two levels, blocks of ids and then ids, so that the
    float64 sums run over a 64th of the vocabulary.
    """
    rows, vocab = weights.shape
    blocks = _blocks(weights)
    coarse = blocks.sum(2).cumsum(1, dtype=torch.float64)  # [rows, blocks]
    target = u * coarse[:, -1]
    block = (coarse <= target[:, None]).sum(1).clamp_(max=coarse.shape[1] - 1)
    before = torch.where(block > 0, coarse.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)
    fine = blocks[torch.arange(rows, device=weights.device), block].cumsum(1, dtype=torch.float64)
    # float32 block sums may exceed the float64 sum of their members by a rounding error
    target = torch.minimum(target - before, fine[:, -1] * (1 - 2.0**-53))
    within = (fine <= target[:, None]).sum(1).clamp_(max=_CDF_BLOCK - 1)
    return (block * _CDF_BLOCK + within).clamp_(max=vocab - 1)
