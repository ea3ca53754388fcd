"""Rows of logits and rows of parameters in, token ids and logprobs out.

Order of operations, for each row:

 1. logprobs, if asked for: log-softmax of the logits as the model gave them
 2. logit_bias is added; ids that are not allowed, bad ids, the last ids of bad sequences, and stop ids before
    min_tokens get -inf
 3. penalties for ids that the row holds: positive logits are divided and negative ones multiplied by the repetition
    penalty (prompt and output; arXiv 1909.05858), then frequency * count and presence are subtracted (output); then
    ids with which the output would leave its language get -inf
 4. temperature 0: the likeliest token, the lowest id of equals
 5. otherwise weights w = exp((logit - highest logit) / temperature), so that the likeliest weighs 1
 6. min_p, then top_k, then top_p: each is a lower bound on w (equals of the last kept token are kept), and
    top_p counts what the two before it left
 7. one uniform number u, a hash of (seed, number of output tokens), picks by inverse CDF in vocabulary order

A row's result depends on no other row: u is the row's own, and the bounds are per row. One number per token, where
Gumbel noise would take one per id of the vocabulary, gives every machine the same draw: from equal logits each
implementation of steps 4 to 7 chooses the same token, but for u within rounding of a border between two.
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
from .transfer import Download, upload

Edits = list[tuple[int, LogitEdits]]
"""(row of the logits, what it does to them)"""


@dataclass(frozen=True)
class Sampled:
    """One entry per row of the logits."""

    token_ids: np.ndarray
    """int64 [rows]; meaningless where `failed`."""
    failed: np.ndarray
    """bool [rows]: the logits held NaN or +inf, or no token was allowed."""
    starved: np.ndarray
    """bool [rows]: no token was allowed, which is one way to have failed."""
    logprobs: list[TokenLogprobs | None]
    """Empty when no row asked."""


class PendingSample:
    """Tokens that the device knows, or will know, before the host does."""

    def __init__(self, token_ids: Tensor, highest: Tensor, raw: RawLogprobs) -> None:
        self.token_ids = token_ids
        """int64 [rows], on the device."""
        self._raw = raw
        self._download = Download({"token_ids": token_ids, "highest": highest, **raw.of(token_ids)})

    def wait(self) -> Sampled:
        """Blocks until this step's results are on the host; what was queued on the device later is not waited for."""
        host = self._download.wait()
        highest = host["highest"]
        return Sampled(host["token_ids"], ~np.isfinite(highest), np.isneginf(highest), self._raw.entries(host))


def sample(logits: Tensor, params: SamplingRows, rows: np.ndarray, ops: Ops) -> PendingSample:
    """Choose one token for each of `rows`.

    logits: float32 [len(rows), vocab]; overwritten. rows: int64, the rows of `params` that they belong to.
    Steps 4 to 7 are `ops.choose_tokens`. On a GPU nothing is waited for.
    """
    indices = rows.tolist()
    wanted_ids = [params.logprob_ids.get(row, ()) for row in indices] if params.logprob_ids else None
    raw = RawLogprobs(logits, params.num_logprobs[rows], wanted_ids)
    if edits := params.edits(indices):
        _ban_and_bias(logits, edits, params.num_output_tokens[rows])
    params.penalties.apply(logits, rows)
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
    params.advance(rows, token_ids)
    return PendingSample(token_ids, highest, raw)


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


def _ban_and_bias(logits: Tensor, edits: Edits, num_output_tokens: np.ndarray) -> None:
    """num_output_tokens: uint64 [rows of the logits]"""
    device = logits.device
    bias_values = np.concatenate([edit.bias_values for _, edit in edits])
    row, token, bias = upload((*_flat(edits, [edit.bias_ids for _, edit in edits]), bias_values), device)
    logits[row, token] += bias
    for index, edit in edits:
        allowed_ids = edit.allowed_ids
        if len(allowed_ids):
            [allowed] = upload([allowed_ids], device)
            kept = logits[index, allowed]
            logits[index] = -torch.inf
            logits[index, allowed] = kept
    banned_ids = [edit.banned_ids(int(num_output_tokens[index])) for index, edit in edits]
    row, token = upload(_flat(edits, banned_ids), device)
    logits[row, token] = -torch.inf


def _flat(edits: Edits, ids: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the logits [row, id] for each of the ids of each edited row."""
    return np.repeat([index for index, _ in edits], [len(part) for part in ids]), np.concatenate(ids)
