"""`octavo bench throughput|latency|streaming|kernels|quality MODEL`: measurements of a model on this machine.

Throughput and latency are those of an engine without HTTP, on exact lengths. Streaming is the processor time of the API
process: everything but the model is real, the core is engine/bench/stub_core.py and the client a third process. Kernels
and quality are measured in a process that imports torch: see engine/bench.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, asynccontextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from configs.errors import RequestError, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig, ServerConfig
from engine.async_engine import AsyncEngine
from engine.machine import core_variables, module_environment, usable_cores
from server.commands.serve import loop_factory
from server.listener import bind

from .load import read_lines
from .report import print_report, print_row
from .target import HttpClient

TEXT = Path(__file__).with_name("quality.txt")
PROMPT_CHARACTERS = 400
FORMS = {
    "{:,}": ("requests", "prompt_tokens", "output_tokens", "seconds", "positions"),
    "{:,.2f}": ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second", "tokens_per_event"),
    "{:.1f}": ("us_per_token", "us_per_event"),
    "{:.0f}": ("us_per_request",),
    "{:.5f}": ("kl_divergence", "kl_divergence_p99"),
    "{:.2%}": ("same_likeliest",),
    "{:.4f}": ("perplexity_float32", "perplexity"),
}
"""The figures that have a line each."""
BATCH_COLUMNS = ("batch", "input", "TTFT ms", "TPOT ms", "tok/s")
KERNEL_COLUMNS = ("kernel", "rows", "ms", "GB/s", "GFLOP/s", "limit", "% of limit", "% of step")


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Print the figures of the benchmark that `arguments.bench` names. Raises `UsageError`."""
    measure = {
        "throughput": _throughput,
        "latency": _latency,
        "streaming": _streaming,
        "kernels": _kernels,
        "quality": _quality,
    }[arguments.bench]
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            report = runner.run(measure(config, arguments))
    except RequestError as error:
        raise UsageError(error.message) from error
    for form, names in FORMS.items():
        for name in names:
            if name in report:
                _print_line(name, form.format(report[name]))
    print_report(arguments.bench, config, report)
    return 0


def _print_line(name: str, value: str) -> None:
    print(f"{name.replace('_', ' '):26}{value:>12}")


# --- an engine without HTTP -------------------------------------------------------------------------------------------


@asynccontextmanager
async def _engine(config: EngineConfig) -> AsyncIterator[tuple[AsyncEngine, dict[str, Any]]]:
    """A warm engine, and what a report says of it."""
    engine = await AsyncEngine.start(config)
    try:
        await _complete(engine, [0] * 4, 2, "warm-up")
        names = ("dtype", "quantization", "device", "attention_backend", "num_threads")
        yield engine, {name: getattr(engine.info, name) for name in names}
    finally:
        await engine.shutdown()


async def _throughput(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """All prompts at once: those of a file, or random ones. Equal seeds give equal prompts and lengths."""
    samples = read_lines("--dataset", arguments.dataset, arguments.output_len) if arguments.dataset else []
    requests = [request for sample in samples for request in sample]
    if not all(isinstance(request.prompt, str) for request in requests):
        raise UsageError(f"--dataset {arguments.dataset}: prompts must be texts")
    draw = random.Random(config.seed)
    async with _engine(config) as (engine, info):
        work = [(await engine.encode(str(request.prompt)), request.output_len) for request in requests] or [
            (_random_prompt(engine, draw, arguments.input_len.draw(draw)), arguments.output_len.draw(draw))
            for _ in range(arguments.num_prompts)
        ]
        for token_ids, num_tokens in work:
            engine.validate(token_ids, _exactly(num_tokens))
        started = time.perf_counter()
        timings = await _complete_all(engine, work)
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
        **info,
    }


async def _latency(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """One batch at a time, by batch size and context. Raises `UsageError` when the largest does not fit."""
    input_len, batch_size, output_len = max(arguments.input_lens), max(arguments.batch_sizes), arguments.output_len
    if not config.enable_prefix_caching:
        raise UsageError("bench latency needs prefix caching, to have all requests decode together")
    if output_len < 2:
        raise UsageError("--output-len must be at least 2: the time per token is that between two")
    if batch_size > config.max_num_seqs:
        raise UsageError(f"--batch-sizes: a step takes at most --max-num-seqs {config.max_num_seqs} requests")
    draw, results = random.Random(config.seed), []
    async with _engine(config) as (engine, info):
        engine.validate([0] * input_len, _exactly(output_len))
        block_size, room = engine.info.block_size, engine.info.kv_cache_tokens
        if -(-(input_len + output_len) // block_size) * batch_size * block_size > room:
            raise UsageError(
                f"{batch_size} requests of {input_len} + {output_len} tokens do not fit the KV cache of {room} tokens; "
                "--kv-cache-tokens makes it larger"
            )
        print_row(BATCH_COLUMNS)
        for input_len, batch_size in product(arguments.input_lens, arguments.batch_sizes):
            batches = [
                await measure_batch(engine, draw, batch_size, input_len, output_len) for _ in range(arguments.repeats)
            ]
            ttft, tpot = (median(values) for values in zip(*batches, strict=True))
            result = {
                "batch_size": batch_size,
                "input_len": input_len,
                "ttft_ms": round(ttft * 1e3, 2),
                "tpot_ms": round(tpot * 1e3, 3),
                "tokens_per_second": round(batch_size / tpot, 1),
            }
            print_row(list(result.values()))
            results.append(result)
    return {"output_len": output_len, "repeats": arguments.repeats, "results": results, **info}


async def measure_batch(
    engine: AsyncEngine, draw: random.Random, batch_size: int, input_len: int, output_len: int
) -> tuple[float, float]:
    """Median time to first token and median time per token, in seconds.

    The batch is sent twice. First with nothing cached and one token to answer: the time to first token, in which the
    prompts wait for each other. Then with the prompts cached, so that all requests decode together from their second
    token on: the time per token of a step of exactly that many rows.
    """
    prompts = [_random_prompt(engine, draw, input_len) for _ in range(batch_size)]
    cold = await _complete_all(engine, [(ids, 1) for ids in prompts])
    cached = await _complete_all(engine, [(ids, output_len) for ids in prompts])
    tpots = [timing.tpot for timing in cached if timing.tpot is not None]
    if not tpots:
        raise UsageError("the tokens came too fast to be timed: take a longer --output-len")
    return median(timing.ttft for timing in cold), median(tpots)


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _random_prompt(engine: AsyncEngine, draw: random.Random, num_tokens: int) -> list[int]:
    return [draw.randrange(engine.info.vocab_size) for _ in range(num_tokens)]


class Timing(NamedTuple):
    """Of one request, in seconds."""

    ttft: float
    tpot: float | None
    """Between the first tokens that were read and the last; None when the reader slept through all steps."""
    num_tokens: int


async def _complete_all(engine: AsyncEngine, work: list[tuple[list[int], int]]) -> list[Timing]:
    """`work`: token ids, and how many to generate."""
    return await asyncio.gather(*(_complete(engine, *each, f"bench-{number}") for number, each in enumerate(work)))


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


# --- HTTP without a model ---------------------------------------------------------------------------------------------


async def _streaming(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Streams of one token and of many are measured; the difference is the tokens' share."""
    from server.http_server import make_server  # a second's work, for this benchmark alone

    streams, output_len = arguments.streams, arguments.output_len
    prompt = TEXT.read_text(encoding="utf-8")[:PROMPT_CHARACTERS]
    engine = await AsyncEngine.start(config, core=("engine.bench.stub_core", str(arguments.step_ms)))
    client = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with client, bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        async def measure(num_tokens: int) -> tuple[int, float]:
            """The number of events, and the seconds of processor time that this process spent on them."""
            body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
            started = time.process_time()
            reading = client.submit(_read_streams, url, streams, json.dumps(body).encode())
            return await asyncio.wrap_future(reading), time.process_time() - started

        server = make_server(engine, ServerConfig(), "stub")
        gc.freeze()  # what was loaded stays: collections need not walk it
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await measure(1)  # first times cost more
            _, seconds = await measure(1)
            num_events, seconds_of_long = await measure(output_len + 1)
        finally:
            server.stop()
            await serving
            await engine.shutdown()
    micros_per_token = (seconds_of_long - seconds) * 1e6 / (streams * output_len)
    # each answer has one more token, and one more event that says why it ended
    tokens_per_event = streams * (output_len + 1) / (num_events - streams)
    return {
        "streams": streams,
        "output_len": output_len,
        "step_ms": arguments.step_ms,
        "tokens_per_event": round(tokens_per_event, 3),
        "us_per_token": round(micros_per_token, 2),
        "us_per_event": round(micros_per_token * tokens_per_event, 2),
        "us_per_request": round(seconds * 1e6 / streams, 1),
    }


def _read_streams(url: str, num_streams: int, body: bytes) -> int:
    """The number of events of that many equal requests.

    Nothing is parsed, so that the cores of this process, which is the client's, are left to the server.
    """
    num_events = 0

    def count(piece: bytes, now: float) -> None:  # each event begins anew in what is received
        nonlocal num_events
        num_events += piece.count(b"data: {")

    async def read_all() -> None:
        client = HttpClient(url, timeout=3600.0)
        await asyncio.gather(*(client.request("POST", "/v1/completions", body, count) for _ in range(num_streams)))
        client.close()

    if hasattr(os, "SCHED_BATCH"):  # each piece would wake the client, which would interrupt what is measured
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(read_all())
    return num_events


# --- inside the engine ------------------------------------------------------------------------------------------------


async def _kernels(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Each C++ kernel, on the model's own weights, against what the machine can do."""
    options = {name: getattr(arguments, name) for name in ("rows", "context", "repeats")}
    report = await _measure_inside("kernels", config, options)
    for name, ceiling in report["ceilings"].items():
        _print_line(name, f"{ceiling:,.1f}")
    for step in report["steps"]:
        print(f"\n{step['what']}: {step['ms']:.2f} ms, of which {step['other_ms']:.2f} ms outside the kernels")
        rows = [KERNEL_COLUMNS, *([_cell(value) for value in kernel.values()] for kernel in step["kernels"])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    return report


def _cell(value: object) -> str:
    return "–" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value)


async def _quality(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the weights' and activations' type costs, against float32, on a text."""
    path = Path(arguments.text or TEXT)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path}: {error}") from error
    return {"text": path.name, **await _measure_inside("quality", config, {"text": text, "window": arguments.window})}


async def _measure_inside(what: str, config: EngineConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `engine/bench/WHAT.py`. Raises `UsageError` with its one line when it cannot measure."""
    command = (sys.executable, "-P", "-m", "engine.bench", what)
    variables = module_environment(core_variables(config.num_threads or usable_cores()))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=variables)
    task = {"config": msgspec.to_builtins(config), "options": options}
    output, _ = await process.communicate(json.dumps(task).encode())
    lines = output.splitlines()
    if process.returncode not in (0, 2) or not lines:
        raise UsageError(f"the measuring process ended with status {process.returncode}; see its messages above")
    answer: dict[str, Any] = json.loads(lines[-1])
    if process.returncode:
        raise UsageError(answer["error"])
    return answer
