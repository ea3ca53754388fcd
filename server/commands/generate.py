"""`octavo generate MODEL --prompt TEXT`: print how the model goes on."""

import argparse
import asyncio
from contextlib import aclosing

from configs.errors import RequestError, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from server.commands.sampling import params_from_flags


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    try:
        asyncio.run(_generate(config, arguments))
    except RequestError as error:
        raise UsageError(error.message) from error
    return 0


async def _generate(config: EngineConfig, arguments: argparse.Namespace) -> None:
    engine = await AsyncEngine.start(config)
    try:
        params = params_from_flags(arguments, engine.default_sampling)
        for number, prompt in enumerate(arguments.prompt):
            await print_answer(engine, prompt, params, f"generate-{number}")
    finally:
        await engine.shutdown()


async def print_answer(engine: AsyncEngine, prompt: str, params: SamplingParams, request_id: str) -> None:
    token_ids = await engine.encode(prompt)
    engine.validate(token_ids, params)
    print(prompt, end="", flush=True)
    async with aclosing(engine.generate(token_ids, params, request_id=request_id)) as outputs:
        async for output in outputs:
            print(output.text, end="", flush=True)
    print()
