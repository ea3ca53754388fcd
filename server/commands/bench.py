"""`octavo bench throughput MODEL`: all prompts at once, without HTTP. The last line is one JSON document."""

import argparse
import asyncio
import json
import platform
import random
import time
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import RequestError, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from engine.machine import free_memory, usable_cores
from engine.messages import CoreReady
from server.serving import EngineFace
from server.version import version

Work = list[tuple[list[int], SamplingParams]]


class DatasetLine(msgspec.Struct, frozen=True):
    prompt: str
    max_tokens: int = 128


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    for name in ("num_prompts", "input_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(arguments, name)}")
    lines = None if arguments.dataset is None else read_dataset(Path(arguments.dataset))
    try:
        report = asyncio.run(_measure(config, arguments, lines))
    except RequestError as error:
        raise UsageError(error.message) from error
    for name in ("requests", "prompt_tokens", "output_tokens", "seconds"):
        print(f"{name.replace('_', ' '):22}{report[name]:>12,}")
    for name in ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second"):
        print(f"{name.replace('_', ' '):26}{report[name]:>10,.2f}")
    print(json.dumps(report))
    return 0


def read_dataset(path: Path) -> list[DatasetLine]:
    """Raises `UsageError` naming the file and line."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset {path}: {error}") from error
    lines = []
    for number, text in enumerate(texts, start=1):
        if text.strip():
            try:
                lines.append(msgspec.json.decode(text, type=DatasetLine))
            except msgspec.MsgspecError as error:
                raise UsageError(f"--dataset {path}, line {number}: {error}") from error
    if not lines:
        raise UsageError(f"--dataset {path}: no prompts")
    return lines


async def _measure(
    config: EngineConfig, arguments: argparse.Namespace, lines: list[DatasetLine] | None
) -> dict[str, Any]:
    engine = await AsyncEngine.start(config)
    try:
        if lines is None:
            work = _random_work(engine.info.vocab_size, arguments, config.seed)
        else:
            work = [(await engine.encode(line.prompt), _exactly(line.max_tokens)) for line in lines]
        for token_ids, params in work:
            engine.validate(token_ids, params)
        await _complete(engine, [0] * 4, _exactly(2), "warm-up")
        started = time.perf_counter()
        counts = await asyncio.gather(
            *(_complete(engine, *pair, f"bench-{number}") for number, pair in enumerate(work))
        )
        seconds = time.perf_counter() - started
        return _report(engine.info, config, sum(len(token_ids) for token_ids, _ in work), counts, seconds)
    finally:
        await engine.shutdown()


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _random_work(vocab_size: int, arguments: argparse.Namespace, seed: int) -> Work:
    draw = random.Random(seed)
    return [
        ([draw.randrange(vocab_size) for _ in range(arguments.input_len)], _exactly(arguments.output_len))
        for _ in range(arguments.num_prompts)
    ]


async def _complete(engine: EngineFace, token_ids: list[int], params: SamplingParams, request_id: str) -> int:
    """Output tokens of one request."""
    count = 0
    async with aclosing(engine.generate(token_ids, params, request_id=request_id)) as outputs:
        async for output in outputs:
            count = output.num_output_tokens
    return count


def _report(
    info: CoreReady, config: EngineConfig, num_prompt_tokens: int, counts: list[int], seconds: float
) -> dict[str, Any]:
    num_output_tokens = sum(counts)
    return {
        "benchmark": "throughput",
        "model": config.model,
        "requests": len(counts),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(counts) / seconds, 3),
        "output_tokens_per_second": round(num_output_tokens / seconds, 2),
        "total_tokens_per_second": round((num_prompt_tokens + num_output_tokens) / seconds, 2),
        "dtype": info.dtype,
        "device": info.device,
        "attention_backend": info.attention_backend,
        "num_threads": info.num_threads,
        "hardware": {
            "processor": processor_name(),
            "machine": platform.machine(),
            "usable_cores": usable_cores(),
            "free_memory_gib": round(free_memory() / 2**30, 1),
            "system": platform.platform(),
        },
        "versions": {"octavo": version(), "python": platform.python_version(), "torch": metadata.version("torch")},
        "settings": msgspec.to_builtins(config),
    }


def processor_name() -> str:
    """The kernel's name for the CPU (Linux), else the platform's."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
