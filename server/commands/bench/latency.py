"""`octavo bench latency MODEL`: one batch at a time, by batch size and context.

Each batch is sent twice. First with nothing cached and one token to answer: the time to first token, in which the
prompts of a batch wait for each other. Then with the prompts cached, so that all requests decode together from
their second token on: the time per token of a step of exactly that many rows.
"""

import argparse
import asyncio
import random
from statistics import median
from typing import Any

from configs.errors import RequestError, UsageError
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine

from .load import Timing, complete, exactly, random_prompt
from .report import engine_facts, print_report, print_row

COLUMNS = ("batch", "input", "TTFT ms", "TPOT ms", "tok/s")


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    if not config.enable_prefix_caching:
        raise UsageError("bench latency needs prefix caching, to have all requests decode together")
    if arguments.output_len < 2:
        raise UsageError("--output-len must be at least 2: the time per token is that between two")
    if max(arguments.batch_sizes) > config.max_num_seqs:
        raise UsageError(f"--batch-sizes: a step takes at most --max-num-seqs {config.max_num_seqs} requests")
    try:
        report = asyncio.run(_measure(config, arguments))
    except RequestError as error:
        raise UsageError(error.message) from error
    print_report("latency", config, report)
    return 0


async def _measure(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    engine = await AsyncEngine.start(config)
    try:
        _check_room(engine, arguments)
        await complete(engine, [0] * 4, exactly(2), "warm-up")
        print_row(COLUMNS)
        draw = random.Random(config.seed)
        results = []
        for input_len in arguments.input_lens:
            for batch_size in arguments.batch_sizes:
                measured = [
                    await measure_batch(engine, draw, batch_size, input_len, arguments.output_len)
                    for _ in range(arguments.repeats)
                ]
                ttft, tpot = (median(values) for values in zip(*measured, strict=True))
                result = {
                    "batch_size": batch_size,
                    "input_len": input_len,
                    "ttft_ms": round(ttft * 1e3, 2),
                    "tpot_ms": round(tpot * 1e3, 3),
                    "tokens_per_second": round(batch_size / tpot, 1),
                }
                print_row(list(result.values()))
                results.append(result)
        sizes = {"output_len": arguments.output_len, "repeats": arguments.repeats}
        return {**sizes, "results": results, **engine_facts(engine.info)}
    finally:
        await engine.shutdown()


async def measure_batch(
    engine: AsyncEngine, draw: random.Random, batch_size: int, input_len: int, output_len: int
) -> tuple[float, float]:
    """Median time to first token and median time per token, in seconds."""
    prompts = [random_prompt(draw, engine.info.vocab_size, input_len) for _ in range(batch_size)]
    cold, cached = [await _send(engine, prompts, num_tokens) for num_tokens in (1, output_len)]
    ttft = median(timing.first - timing.sent for timing in cold)
    # No division by zero: the engine needs two steps for two tokens, and a reader that slept through all of them has
    # no time to tell.
    tpot = [(t.last - t.first) / (t.num_tokens - t.num_first) for t in cached if t.num_tokens > t.num_first]
    if not tpot:
        raise UsageError("the tokens came too fast to be timed: take a longer --output-len")
    return ttft, median(tpot)


async def _send(engine: AsyncEngine, prompts: list[list[int]], num_tokens: int) -> list[Timing]:
    params = exactly(num_tokens)
    requests = (complete(engine, prompt, params, f"bench-{number}") for number, prompt in enumerate(prompts))
    return await asyncio.gather(*requests)


def _check_room(engine: AsyncEngine, arguments: argparse.Namespace) -> None:
    """Raises `RequestError` or `UsageError` when the largest batch does not fit."""
    input_len, batch_size, info = max(arguments.input_lens), max(arguments.batch_sizes), engine.info
    engine.validate([0] * input_len, exactly(arguments.output_len))
    blocks = -(-(input_len + arguments.output_len) // info.block_size) * batch_size
    if blocks * info.block_size > info.kv_cache_tokens:
        raise UsageError(
            f"{batch_size} requests of {input_len} + {arguments.output_len} tokens do not fit the KV cache of "
            f"{info.kv_cache_tokens} tokens; --kv-cache-tokens makes it larger"
        )
