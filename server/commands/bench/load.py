"""Work for an engine: random prompts, and requests that run to an exact length."""

import random
import time
from contextlib import aclosing
from typing import NamedTuple

from configs.sampling import SamplingParams
from engine.async_engine import AsyncEngine


class Timing(NamedTuple):
    """Of one request: seconds by `time.perf_counter`."""

    sent: float
    first: float
    last: float
    num_first: int
    """Tokens that came first: more than one when the reader was late."""
    num_tokens: int


def exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def random_prompt(source: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    return [source.randrange(vocab_size) for _ in range(num_tokens)]


async def complete(engine: AsyncEngine, token_ids: list[int], params: SamplingParams, request_id: str) -> Timing:
    """One request, read to its end."""
    sent = time.perf_counter()
    first, num_first, count = 0.0, 0, 0
    async with aclosing(engine.generate(token_ids, params, request_id=request_id)) as outputs:
        async for output in outputs:
            count = output.num_output_tokens
            if not num_first:
                first, num_first = time.perf_counter(), count
    return Timing(sent, first, time.perf_counter(), num_first, count)
