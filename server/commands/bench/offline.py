"""`octavo bench throughput MODEL` and `octavo bench latency MODEL`: an engine without HTTP, on exact lengths."""

import argparse
import asyncio
import random
import time
from contextlib import aclosing
from statistics import median
from typing import Any, NamedTuple

from configs.errors import RequestError, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine

from .datasets import Sample, read_lines
from .report import print_lines, print_report, print_row

THROUGHPUT = dict.fromkeys(("requests", "prompt_tokens", "output_tokens", "seconds"), "{:,}") | dict.fromkeys(
    ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second"), "{:,.2f}"
)
COLUMNS = ("batch", "input", "TTFT ms", "TPOT ms", "tok/s")


class Timing(NamedTuple):
    """Of one request, in seconds."""

    ttft: float
    tpot: float | None
    """Between the first tokens that were read and the last; None when the reader slept through all steps."""
    num_tokens: int


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Print the figures of the benchmark that `arguments.bench` names. Raises `UsageError`."""
    samples: list[Sample] = []
    if arguments.bench == "latency":
        _check_latency_flags(config, arguments)
    elif arguments.dataset is not None:
        samples = read_lines("--dataset", arguments.dataset, arguments.output_len)
        if any(not isinstance(request.prompt, str) for sample in samples for request in sample):
            raise UsageError(f"--dataset {arguments.dataset}: prompts must be texts")
    try:
        report = asyncio.run(_measure(config, arguments, samples))
    except RequestError as error:
        raise UsageError(error.message) from error
    if arguments.bench == "throughput":
        print_lines(report, THROUGHPUT)
    print_report(arguments.bench, config, report)
    return 0


async def _measure(config: EngineConfig, arguments: argparse.Namespace, samples: list[Sample]) -> dict[str, Any]:
    engine = await AsyncEngine.start(config)
    try:
        if arguments.bench == "latency":
            report = await _latency(engine, arguments, random.Random(config.seed))
        else:
            report = await _throughput(engine, arguments, random.Random(config.seed), samples)
        names = ("dtype", "quantization", "device", "attention_backend", "num_threads")
        return report | {name: getattr(engine.info, name) for name in names}
    finally:
        await engine.shutdown()


async def _throughput(
    engine: AsyncEngine, arguments: argparse.Namespace, draw: random.Random, samples: list[Sample]
) -> dict[str, Any]:
    """All prompts at once: those of a file, or random ones. Equal seeds give equal prompts and lengths."""
    work = [(await engine.encode(str(r.prompt)), r.output_len) for sample in samples for r in sample]
    if not samples:
        vocab_size = engine.info.vocab_size
        work = [
            (_random_prompt(draw, vocab_size, arguments.input_len.draw(draw)), arguments.output_len.draw(draw))
            for _ in range(arguments.num_prompts)
        ]
    for token_ids, num_tokens in work:
        engine.validate(token_ids, _exactly(num_tokens))
    await _complete(engine, [0] * 4, 2, "warm-up")
    started = time.perf_counter()
    timings = await asyncio.gather(*(_complete(engine, *pair, f"bench-{number}") for number, pair in enumerate(work)))
    seconds = time.perf_counter() - started
    num_prompt_tokens, num_output_tokens = sum(len(ids) for ids, _ in work), sum(t.num_tokens for t in timings)
    return {
        "requests": len(work),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(work) / seconds, 3),
        "output_tokens_per_second": round(num_output_tokens / seconds, 2),
        "total_tokens_per_second": round((num_prompt_tokens + num_output_tokens) / seconds, 2),
    }


def _check_latency_flags(config: EngineConfig, arguments: argparse.Namespace) -> None:
    if not config.enable_prefix_caching:
        raise UsageError("bench latency needs prefix caching, to have all requests decode together")
    if arguments.output_len < 2:
        raise UsageError("--output-len must be at least 2: the time per token is that between two")
    if max(arguments.batch_sizes) > config.max_num_seqs:
        raise UsageError(f"--batch-sizes: a step takes at most --max-num-seqs {config.max_num_seqs} requests")


async def _latency(engine: AsyncEngine, arguments: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """One batch at a time, by batch size and context."""
    _check_room(engine, arguments)
    await _complete(engine, [0] * 4, 2, "warm-up")
    print_row(COLUMNS)
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
    return {"output_len": arguments.output_len, "repeats": arguments.repeats, "results": results}


async def measure_batch(
    engine: AsyncEngine, draw: random.Random, batch_size: int, input_len: int, output_len: int
) -> tuple[float, float]:
    """Median time to first token and median time per token, in seconds.

    The batch is sent twice. First with nothing cached and one token to answer: the time to first token, in which the
    prompts wait for each other. Then with the prompts cached, so that all requests decode together from their second
    token on: the time per token of a step of exactly that many rows.
    """
    prompts = [_random_prompt(draw, engine.info.vocab_size, input_len) for _ in range(batch_size)]
    cold, cached = [
        await asyncio.gather(*(_complete(engine, ids, num_tokens, f"bench-{n}") for n, ids in enumerate(prompts)))
        for num_tokens in (1, output_len)
    ]
    tpots = [timing.tpot for timing in cached if timing.tpot is not None]
    if not tpots:
        raise UsageError("the tokens came too fast to be timed: take a longer --output-len")
    return median(timing.ttft for timing in cold), median(tpots)


def _check_room(engine: AsyncEngine, arguments: argparse.Namespace) -> None:
    """Raises `RequestError` or `UsageError` when the largest batch does not fit."""
    input_len, batch_size, info = max(arguments.input_lens), max(arguments.batch_sizes), engine.info
    engine.validate([0] * input_len, _exactly(arguments.output_len))
    blocks = -(-(input_len + arguments.output_len) // info.block_size) * batch_size
    if blocks * info.block_size > info.kv_cache_tokens:
        raise UsageError(
            f"{batch_size} requests of {input_len} + {arguments.output_len} tokens do not fit the KV cache of "
            f"{info.kv_cache_tokens} tokens; --kv-cache-tokens makes it larger"
        )


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _random_prompt(source: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    return [source.randrange(vocab_size) for _ in range(num_tokens)]


async def _complete(engine: AsyncEngine, token_ids: list[int], num_tokens: int, request_id: str) -> Timing:
    """One request, read to its end."""
    sent = first = time.perf_counter()
    num_first = count = 0
    async with aclosing(engine.generate(token_ids, _exactly(num_tokens), request_id=request_id)) as outputs:
        async for output in outputs:
            count = output.num_output_tokens
            if not num_first:
                first, num_first = time.perf_counter(), count
    tpot = (time.perf_counter() - first) / (count - num_first) if count > num_first else None
    return Timing(first - sent, tpot, count)
