"""Rows of logits and rows of parameters in, token ids and logprobs out.

Order of operations, for each row:

 1. logprobs, if asked for: log-softmax of the logits as the model gave them
 2. logit_bias is added; ids that are not allowed, bad ids, the last ids of bad sequences, and stop ids before
    min_tokens get -inf
 3. repetition penalty (prompt + output), then frequency and presence penalties (output); then ids with which the
    output would leave its language get -inf
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

from .kernels.ops import Ops, TokenChoice
from .logprobs import RawLogprobs
from .messages import TokenLogprobs
from .sampling_rows import LogitEdits, SamplingRows
from .structured.language import forbid

Edits = list[tuple[int, LogitEdits]]
"""(row of the logits, what it does to them)"""


@dataclass(frozen=True)
class Sampled:
    """One entry per row of the logits."""

    token_ids: np.ndarray
    """int64 [rows]; meaningless where `failed`."""
    failed: np.ndarray
    """bool [rows]: the logits held NaN or +inf, or no token was allowed."""
    logprobs: list[TokenLogprobs | None]
    """Empty when no row asked."""


def sample(logits: Tensor, params: SamplingRows, rows: np.ndarray, ops: Ops) -> Sampled:
    """Choose one token for each of `rows`.

    logits: float32 [len(rows), vocab]; overwritten. rows: int64, the rows of `params` that they belong to.
    Steps 4 to 7 are `ops.choose_tokens`.
    """
    indices = rows.tolist()
    wanted_ids = [params.logprob_ids.get(row, ()) for row in indices] if params.logprob_ids else None
    raw = RawLogprobs(logits, params.num_logprobs[rows], wanted_ids)
    if edits := params.edits(indices):
        _ban_and_bias(logits, edits)
        _penalise(logits, edits)
    if matchers := params.matchers_of(indices):
        forbid(logits, matchers)
    choice = TokenChoice(
        temperature=params.temperature[rows],
        top_k=params.top_k[rows],
        top_p=params.top_p[rows],
        min_p=params.min_p[rows],
        u=uniform(params.seed[rows], params.num_output_tokens[rows]),
    )
    token_ids, highest = ops.choose_tokens(logits, choice)
    return Sampled(token_ids, ~np.isfinite(highest), raw.entries(token_ids))


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
    for index, edit in edits:
        if len(edit.allowed_ids):
            allowed = torch.from_numpy(edit.allowed_ids).to(logits.device)
            kept = logits[index, allowed]
            logits[index] = -torch.inf
            logits[index, allowed] = kept
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
