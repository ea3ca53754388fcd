"""`AsyncEngine`: the engine as the server sees it. Text in this process, tokens in the core's. Imports no torch."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from configs.errors import EngineDead, InvalidRequest
from configs.sampling import SamplingParams
from configs.settings import EngineConfig

from .checkpoints import Checkpoint
from .core_client import CoreClient
from .input_processor import InputProcessor
from .messages import AbortRequests, AddRequest, CoreReady, TokenOutput
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .text.tokenizer import Tokenizer

_LONG_TEXT = 2000
"""Characters; shorter texts are encoded on the event loop, in less time than a change of threads takes."""


class Mailbox:
    """One slot between the core and a reader: what the reader has not taken yet is merged."""

    def __init__(self) -> None:
        self._output: TokenOutput | None = None
        self._dead: str | None = None
        self._filled = asyncio.Event()
        self.is_closed = False
        """The core's last word on the request has come in."""

    def put(self, output: TokenOutput) -> None:
        self._output = output if self._output is None else _merge(self._output, output)
        self.is_closed = output.finish_reason is not None
        self._filled.set()

    def die(self, reason: str) -> None:
        self._dead = reason
        self._filled.set()

    async def take(self) -> TokenOutput:
        """Wait for the next output. Raises `EngineDead` when there will be none."""
        await self._filled.wait()
        output, self._output = self._output, None
        if output is None:
            raise EngineDead(self._dead or "the engine has stopped")
        if self._dead is None:
            self._filled.clear()
        return output


def _merge(old: TokenOutput, new: TokenOutput) -> TokenOutput:
    logprobs = None
    if old.logprobs is not None or new.logprobs is not None:
        logprobs = (old.logprobs or []) + (new.logprobs or [])
    return msgspec.structs.replace(new, new_token_ids=old.new_token_ids + new.new_token_ids, logprobs=logprobs)


class AsyncEngine:
    """Many requests at once, each an async generator; one core process."""

    def __init__(self, client: CoreClient, inputs: InputProcessor, info: CoreReady) -> None:
        self.info = info
        self._client = client
        self._inputs = inputs
        self._mailboxes: dict[str, Mailbox] = {}
        self._death: str | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-text")
        self._tasks = [asyncio.create_task(self._receive_outputs()), asyncio.create_task(self._watch_core())]

    @classmethod
    async def start(cls, config: EngineConfig) -> "AsyncEngine":
        """Start the core and load the tokenizer meanwhile. Raises `UsageError` with one line that says why not."""
        client = await CoreClient.start(config)
        try:
            inputs = await asyncio.to_thread(InputProcessor, config)
            info = await client.wait_ready()
        except BaseException:
            await client.close()
            raise
        return cls(client, inputs, info)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._inputs.tokenizer

    @property
    def checkpoint(self) -> Checkpoint:
        return self._inputs.checkpoint

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams` for requests that leave them out, from the checkpoint's generation config."""
        return self._inputs.default_sampling

    @property
    def is_dead(self) -> bool:
        """True once the core process has ended; every request fails from then on."""
        return self._death is not None

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; a long one does not hold up other requests."""
        if len(text) < _LONG_TEXT:
            return self._inputs.encode(text, add_special_tokens=add_special_tokens)
        return await self._in_thread(lambda: self._inputs.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of the chat as the template renders it. Raises `InvalidRequest` when it refuses."""
        return await self._in_thread(lambda: self._inputs.encode_chat(messages, **template_kwargs))

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise `InvalidRequest` or `ContextLengthExceeded` for what the core could not answer."""
        self._inputs.validate(prompt_token_ids, params, self.info)

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Differences as they come, the last with a finish reason. One choice: fan out with `params.for_choice`.

        Closing or cancelling the generator aborts the request. Raises `EngineDead`, `RequestFailed`, or the
        `InvalidRequest` with which the core refuses.
        """
        assert params.n == 1, params.n
        if self._death is not None:
            raise EngineDead(self._death)
        if request_id in self._mailboxes:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        processor = OutputProcessor(self.tokenizer, prompt_token_ids, params)
        mailbox = self._mailboxes[request_id] = Mailbox()
        self._client.send(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling_params=params,
                eos_token_ids=self.checkpoint.eos_token_ids,
                priority=priority,
                cache_salt=cache_salt,
            )
        )
        try:
            finished = False
            while not finished:
                output = processor.process(await mailbox.take())
                finished = output.finish_reason is not None
                if finished:  # the core learns of a stop string now, not when the reader comes back
                    self._forget(request_id)
                yield output
        finally:
            self._forget(request_id)

    async def shutdown(self) -> None:
        """End the core process; requests that still run fail with `EngineDead`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._die("the engine has been shut down")
        self._threads.shutdown(wait=False)
        await self._client.close()

    def _forget(self, request_id: str) -> None:
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None and not mailbox.is_closed and not self.is_dead:
            self._client.send(AbortRequests([request_id]))

    async def _receive_outputs(self) -> None:
        while True:
            for output in await self._client.receive():
                if mailbox := self._mailboxes.get(output.request_id):
                    mailbox.put(output)

    async def _watch_core(self) -> None:
        end = await self._client.wait_end()
        self._die(f"the engine has stopped ({end}); see the server's log")

    def _die(self, reason: str) -> None:
        self._death = self._death or reason
        for mailbox in self._mailboxes.values():
            mailbox.die(self._death)

    async def _in_thread(self, work: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
