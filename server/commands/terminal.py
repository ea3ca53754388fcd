"""`octavo generate MODEL --prompt TEXT` and `octavo chat MODEL`, which print what the model says as it comes.

In a chat, Ctrl-C stops an answer; /exit or Ctrl-D leaves.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from configs.errors import InvalidRequest, RequestError, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from server.flags import SAMPLING


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """The event loop runs only while the model answers, so that reading a line is plain `input`."""
    with asyncio.Runner() as runner:
        engine = runner.run(AsyncEngine.start(config))
        try:
            params = params_from_flags(arguments, engine.default_sampling)
            if arguments.command == "chat":
                print("Type a message; /exit leaves, Ctrl-C stops an answer.")
                converse(runner, Conversation(engine, params))
            else:
                runner.run(generate(engine, arguments.prompt, params))
        finally:
            runner.run(engine.shutdown())
    return 0


def params_from_flags(arguments: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    """Flags over the checkpoint's `defaults`; without --max-tokens an answer may fill the context."""
    given = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    if arguments.stop:
        given["stop"] = tuple(arguments.stop)
    try:
        return SamplingParams(**{"max_tokens": None, **defaults, **given})
    except InvalidRequest as error:
        raise UsageError(error.message) from error


async def generate(engine: AsyncEngine, prompts: Sequence[str], params: SamplingParams) -> None:
    """Print each prompt and how the model goes on. Raises `UsageError`."""
    try:
        for number, prompt in enumerate(prompts):
            token_ids = await engine.encode(prompt)
            engine.validate(token_ids, params)
            print(prompt, end="", flush=True)
            await print_answer(engine, token_ids, params, f"generate-{number}", {"content": ""})
    except RequestError as error:
        raise UsageError(error.message) from error


async def print_answer(
    engine: AsyncEngine, token_ids: list[int], params: SamplingParams, request_id: str, reply: dict[str, str]
) -> None:
    """Print text as it comes, and add it to the content of `reply`."""
    async with aclosing(engine.generate(token_ids, params, request_id=request_id)) as outputs:
        async for output in outputs:
            reply["content"] += output.text
            print(output.text, end="", flush=True)
    print()


class Conversation:
    """Messages so far. An answer that was stopped stays as far as it came."""

    def __init__(self, engine: AsyncEngine, params: SamplingParams) -> None:
        self.engine = engine
        self.params = params
        self.messages: list[dict[str, str]] = []

    async def answer(self, text: str) -> None:
        """Print the model's answer as it comes. Raises `RequestError`; the message is then forgotten."""
        self.messages.append({"role": "user", "content": text})
        try:
            token_ids = (await self.engine.render_chat(self.messages)).token_ids
            self.engine.validate(token_ids, self.params)
        except RequestError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": ""})
        request_id = f"chat-{len(self.messages)}"
        await print_answer(self.engine, token_ids, self.params, request_id, self.messages[-1])


def converse(runner: asyncio.Runner, conversation: Conversation) -> None:
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/exit":
            return
        if not text:
            continue
        try:
            runner.run(conversation.answer(text))
        except KeyboardInterrupt:
            print(" [stopped]")
        except RequestError as error:
            if conversation.engine.is_dead:
                raise UsageError(error.message) from error
            print(error.message)
