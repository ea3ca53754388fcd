"""`octavo chat MODEL`: a conversation in the terminal. Ctrl-C stops an answer; /exit or Ctrl-D leaves."""

import argparse
import asyncio
from contextlib import aclosing

from configs.errors import RequestError, UsageError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from engine.async_engine import AsyncEngine
from server.commands.sampling import params_from_flags


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """The event loop runs only while the model answers, so that reading a line is plain `input`."""
    with asyncio.Runner() as runner:
        engine = runner.run(AsyncEngine.start(config))
        try:
            params = params_from_flags(arguments, engine.default_sampling)
            print("Type a message; /exit leaves, Ctrl-C stops an answer.")
            converse(runner, Conversation(engine, params))
        finally:
            runner.run(engine.shutdown())
    return 0


class Conversation:
    """Messages so far. An answer that was stopped stays as far as it came."""

    def __init__(self, engine: AsyncEngine, params: SamplingParams) -> None:
        self.engine = engine
        self.params = params
        self.messages: list[dict[str, str]] = []

    async def answer(self, text: str) -> None:
        """Print the model's answer as it comes. Raises `RequestError`; the message is then forgotten."""
        self.messages.append({"role": "user", "content": text})
        reply = {"role": "assistant", "content": ""}
        try:
            token_ids = (await self.engine.render_chat(self.messages)).token_ids
            self.engine.validate(token_ids, self.params)
        except RequestError:
            self.messages.pop()
            raise
        self.messages.append(reply)
        request_id = f"chat-{len(self.messages)}"
        async with aclosing(self.engine.generate(token_ids, self.params, request_id=request_id)) as outputs:
            async for output in outputs:
                reply["content"] += output.text
                print(output.text, end="", flush=True)
        print()


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
