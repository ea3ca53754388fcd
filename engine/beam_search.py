"""Beam search over single steps of the engine: the likeliest sequences instead of drawn ones.

The search of transformers' `generate(num_beams=…, early_stopping="never")`: of the 2 * width best continuations of all
beams those that end count when they are among the first `width`, and the first `width` others go on. A sequence's
score is the sum of its log-probabilities over length ** length_penalty (Wu et al., arXiv 1609.08144, simplified).
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import nlargest

from .messages import TokenLogprobs

NextTokens = Callable[[Sequence[list[int]]], Awaitable[list[TokenLogprobs]]]
"""Of each sequence (its output so far), the 2 * width likeliest next tokens in `top`."""


@dataclass(frozen=True)
class Beam:
    token_ids: list[int]
    """The output; an end-of-sequence id is its last."""
    sum_logprobs: float = 0.0
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        return self.sum_logprobs / len(self.token_ids) ** length_penalty


async def beam_search(
    next_tokens: NextTokens, *, width: int, max_tokens: int, length_penalty: float, eos_token_ids: Collection[int]
) -> list[Beam]:
    """The `width` best sequences of at most `max_tokens` tokens, best first."""

    def score(beam: Beam) -> float:
        return beam.score(length_penalty)

    live, done = [Beam([])], list[Beam]()
    for length in range(1, max_tokens + 1):
        continued = [
            Beam([*beam.token_ids, token_id], beam.sum_logprobs + logprob, token_id in eos_token_ids)
            for beam, entry in zip(live, await next_tokens([beam.token_ids for beam in live]), strict=True)
            for token_id, logprob in entry.top
        ]
        best = nlargest(2 * width, continued, key=lambda beam: beam.sum_logprobs)
        done = nlargest(width, [*done, *(beam for beam in best[:width] if beam.ended)], key=score)
        live = [beam for beam in best if not beam.ended][:width]
        longest = max_tokens if length_penalty > 0 else length
        if not live or (len(done) == width and score(done[-1]) >= live[0].sum_logprobs / longest**length_penalty):
            return done
    return nlargest(width, done + live, key=score)
