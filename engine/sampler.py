"""Rows of logits and rows of parameters in, token ids and logprobs out.

Order of operations, for each row:

 1. logprobs, if asked for: log-softmax of the logits as the model gave them
 2. logit_bias is added; bad ids, and stop ids before min_tokens, get -inf
 3. repetition penalty (prompt + output), then frequency and presence penalties (output)
 4. temperature 0: the likeliest token, the lowest id of equals
 5. otherwise weights w = exp((logit - highest logit) / temperature), so that the likeliest weighs 1
 6. min_p, then top_k, then top_p: each is a lower bound on w (equals of the last kept token are kept), and
    top_p counts what the two before it left
 7. one uniform number u, a hash of (seed, number of output tokens), picks by inverse CDF in vocabulary order

A row's result depends on no other row: u is the row's own, and the bounds are per row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .logprobs import RawLogprobs
from .messages import TokenLogprobs
from .sampling_rows import LogitEdits, SamplingRows

LOWEST_TEMPERATURE = 1e-30
"""Lower ones behave alike: the likeliest token. Keeps the division within float32."""

Edits = list[tuple[int, LogitEdits]]
"""(row of the logits, what it does to them)"""

_CANDIDATES = 256  # likeliest tokens in which top_p looks first; a full sort takes several times as long
_CDF_BLOCK = 64  # vocabulary ids per step of the coarse CDF


@dataclass(frozen=True)
class Sampled:
    """One entry per row of the logits."""

    token_ids: np.ndarray
    """int64 [rows]; meaningless where `failed`."""
    failed: np.ndarray
    """bool [rows]: the logits held NaN or +inf, or no token was allowed."""
    logprobs: list[TokenLogprobs | None]
    """Empty when no row asked."""


def sample(logits: Tensor, params: SamplingRows, rows: np.ndarray) -> Sampled:
    """Choose one token for each of `rows`.

    logits: float32 [len(rows), vocab]; overwritten. rows: int64, the rows of `params` that they belong to.
    """
    raw = RawLogprobs(logits, params.num_logprobs[rows])
    edits = params.edits(rows.tolist())
    if edits:
        _ban_and_bias(logits, edits)
        _penalise(logits, edits)
    highest, chosen = logits.max(dim=-1)  # NaN if the row holds one; the first of equals
    drawing = np.flatnonzero(params.temperature[rows] > 0)
    if len(drawing):
        every = len(drawing) == len(rows)
        index = torch.from_numpy(drawing).to(logits.device)
        part = logits if every else logits[index]
        chosen[index] = _draw(part, highest[index], params, rows[drawing])
    failed = ~torch.isfinite(highest).cpu().numpy()
    token_ids = chosen.cpu().numpy()
    return Sampled(token_ids, failed, raw.entries(token_ids))


def uniform(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from a 64-bit seed and a counter, both uint64 of one shape.

    The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), once for each of the two words.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        word = _mix64(_mix64(seeds + golden) + (counters + np.uint64(1)) * golden)
    u: np.ndarray = (word >> np.uint64(11)) * 2.0**-53
    return u


def _mix64(word: np.ndarray) -> np.ndarray:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word


def _flat(edits: Edits, ids: list[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the logits [row, id] for each of the ids of each edited row."""
    row = np.repeat([index for index, _ in edits], [len(part) for part in ids])
    return torch.from_numpy(row).to(device), torch.from_numpy(np.concatenate(ids)).to(device)


def _ban_and_bias(logits: Tensor, edits: Edits) -> None:
    row, token = _flat(edits, [edit.bias_ids for _, edit in edits], logits.device)
    logits[row, token] += torch.from_numpy(np.concatenate([edit.bias_values for _, edit in edits])).to(logits.device)
    row, token = _flat(edits, [edit.banned_ids for _, edit in edits], logits.device)
    logits[row, token] = -torch.inf


def _penalise(logits: Tensor, edits: Edits) -> None:
    """Positive logits are divided and negative ones multiplied by the repetition penalty (arXiv 1909.05858);
    then frequency * count + presence * (count > 0) is subtracted."""
    edits = [(index, edit) for index, edit in edits if edit.has_penalties]
    if not edits:
        return
    ids, counts = zip(*(edit.counted for _, edit in edits), strict=True)
    row, token = _flat(edits, list(ids), logits.device)
    factors = np.array([(edit.repetition, edit.frequency, edit.presence) for _, edit in edits], np.float32)
    per_token = torch.from_numpy(np.repeat(factors, [len(part) for part in ids], axis=0)).to(logits.device)
    repetition, frequency, presence = per_token.unbind(1)
    count = torch.from_numpy(np.concatenate(counts)).to(logits.device)
    values = logits[row, token]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[row, token] = values - frequency * count - presence * (count > 0)


def _draw(logits: Tensor, highest: Tensor, params: SamplingRows, rows: np.ndarray) -> Tensor:
    """Token ids, int64 [len(rows)], drawn from logits [len(rows), vocab], which are overwritten."""
    device = logits.device
    temperature = np.maximum(params.temperature[rows], LOWEST_TEMPERATURE)
    weights = logits.sub_(highest[:, None]).div_(torch.from_numpy(temperature)[:, None].to(device)).exp_()
    if (params.min_p[rows] > 0).any():
        weights.masked_fill_(weights < torch.from_numpy(params.min_p[rows])[:, None].to(device), 0.0)
    vocab = weights.shape[1]
    limited = np.flatnonzero((params.top_k[rows] > 0) & (params.top_k[rows] < vocab) | (params.top_p[rows] < 1))
    if len(limited):
        index = torch.from_numpy(limited).to(device)
        part = weights if len(limited) == len(rows) else weights[index]
        _keep_likeliest(part, params.top_k[rows[limited]], params.top_p[rows[limited]])
        if part is not weights:
            weights[index] = part
    u = torch.from_numpy(uniform(params.seed[rows], params.num_output_tokens[rows])).to(device)
    return _inverse_cdf(weights, u)


def _keep_likeliest(weights: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> None:
    """Zero what top_k and top_p leave out of weights [rows, vocab], in place; top_k 0 and top_p 1 keep all."""
    device, vocab = weights.device, weights.shape[1]
    top_k = np.where(top_k == 0, vocab, np.minimum(top_k, vocab))
    most = int(top_k[top_k < vocab].max(initial=_CANDIDATES if (top_p < 1).any() else 1))
    best = weights.topk(min(vocab, most)).values  # [rows, candidates], descending
    if (top_k < vocab).any():
        last = torch.from_numpy(np.minimum(top_k, best.shape[1]) - 1).to(device)
        bound = best.gather(1, last[:, None])
        bound[torch.from_numpy(top_k == vocab).to(device)] = 0.0
        weights.masked_fill_(weights < bound, 0.0)
    if (top_p < 1).any():
        target = _blocks(weights).sum(2).sum(1, dtype=torch.float64) * torch.from_numpy(top_p).to(device)
        bound = torch.where(torch.from_numpy(top_p < 1).to(device), _nucleus_bound(weights, best, target), 0.0)[:, None]
        weights.masked_fill_(weights < bound, 0.0)


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
