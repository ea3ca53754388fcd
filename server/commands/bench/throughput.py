"""`octavo bench throughput MODEL`: all prompts at once, without HTTP."""

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import RequestError, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine

from .load import complete, exactly, random_prompt
from .report import engine_facts, print_report

Work = list[tuple[list[int], SamplingParams]]


class DatasetLine(msgspec.Struct, frozen=True):
    prompt: str
    max_tokens: int = 128


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    lines = None if arguments.dataset is None else read_dataset(Path(arguments.dataset))
    try:
        report = asyncio.run(_measure(config, arguments, lines))
    except RequestError as error:
        raise UsageError(error.message) from error
    for name in ("requests", "prompt_tokens", "output_tokens", "seconds"):
        print(f"{name.replace('_', ' '):22}{report[name]:>12,}")
    for name in ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second"):
        print(f"{name.replace('_', ' '):26}{report[name]:>10,.2f}")
    print_report("throughput", config, report)
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


def random_work(vocab_size: int, arguments: argparse.Namespace, seed: int) -> Work:
    """Equal seeds give equal prompts and lengths."""
    draw = random.Random(seed)
    return [
        (random_prompt(draw, vocab_size, arguments.input_len.draw(draw)), exactly(arguments.output_len.draw(draw)))
        for _ in range(arguments.num_prompts)
    ]


async def _measure(
    config: EngineConfig, arguments: argparse.Namespace, lines: list[DatasetLine] | None
) -> dict[str, Any]:
    engine = await AsyncEngine.start(config)
    try:
        if lines is None:
            work = random_work(engine.info.vocab_size, arguments, config.seed)
        else:
            work = [(await engine.encode(line.prompt), exactly(line.max_tokens)) for line in lines]
        for token_ids, params in work:
            engine.validate(token_ids, params)
        await complete(engine, [0] * 4, exactly(2), "warm-up")
        started = time.perf_counter()
        timings = await asyncio.gather(
            *(complete(engine, *pair, f"bench-{number}") for number, pair in enumerate(work))
        )
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
            **engine_facts(engine.info),
        }
    finally:
        await engine.shutdown()
