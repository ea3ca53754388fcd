"""`AsyncEngine`: the engine as the server sees it. Text in this process, tokens in the core's. Imports no torch."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from configs.errors import EngineDead, InvalidRequest
from configs.sampling import SamplingParams
from configs.settings import EngineConfig

from .checkpoints import Checkpoint
from .core_client import CORE, CoreClient
from .input_processor import InputProcessor
from .messages import AbortRequests, AddRequest, CoreReady, TokenOutput
from .output_mailbox import Mailbox
from .output_processor import OutputProcessor
from .outputs import OutputBatch, RequestOutput
from .text.tokenizer import Tokenizer

_LONG_TEXT = 2000
"""Characters; shorter texts are encoded on the event loop, in less time than a change of threads takes."""


class AsyncEngine:
    """Many requests at once, each an async generator over one mailbox; one core process."""

    def __init__(self, client: CoreClient, inputs: InputProcessor, info: CoreReady) -> None:
        self.info = info
        self._client = client
        self._inputs = inputs
        self._mailboxes: dict[str, Mailbox] = {}
        self._death: str | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-text")
        self._watcher = asyncio.create_task(self._watch_core())
        client.on_outputs = self._deliver

    @classmethod
    async def start(cls, config: EngineConfig, core: Sequence[str] = CORE) -> "AsyncEngine":
        """Start the core and load the tokenizer meanwhile. Raises `UsageError` with one line that says why not."""
        client = await CoreClient.start(config, core)
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
        """`generate_many` of a single choice."""
        choices = [(prompt_token_ids, params)]
        batches = self.generate_many(choices, request_id=request_id, priority=priority, cache_salt=cache_salt)
        async with aclosing(batches):
            async for batch in batches:
                for _, output in batch:
                    yield output

    async def generate_many(
        self,
        choices: Sequence[tuple[list[int], SamplingParams]],
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[OutputBatch, None]:
        """Differences as they come, each choice's last with a finish reason. Fan out with `params.for_choice`.

        Closing or cancelling the generator aborts what still runs. Raises `EngineDead`, `RequestFailed`, or the
        `InvalidRequest` with which the core refuses.
        """
        if self._death is not None:
            raise EngineDead(self._death)
        running: dict[str, tuple[int, OutputProcessor]] = {}
        mailbox = Mailbox()
        try:
            for index, (token_ids, params) in enumerate(choices):
                request = self._request(f"{request_id}-{index}", token_ids, params, priority, cache_salt)
                running[request.request_id] = (index, OutputProcessor(self.tokenizer, token_ids, params))
                self._mailboxes[request.request_id] = mailbox
                self._client.send(request)
            while running:
                await mailbox.filled()
                batch = []
                for tokens in mailbox.take():
                    index, processor = running[tokens.request_id]
                    output = processor.process(tokens)
                    if output.finish_reason is not None:
                        del running[tokens.request_id]
                        # now, not when the reader comes back: of a stop string the core knows nothing
                        self._forget([tokens.request_id], in_core=tokens.finish_reason is None)
                    batch.append((index, output))
                yield batch
        finally:
            self._forget(list(running), in_core=True)

    async def shutdown(self) -> None:
        """End the core process; requests that still run fail with `EngineDead`."""
        self._watcher.cancel()
        await asyncio.gather(self._watcher, return_exceptions=True)
        self._die("the engine has been shut down")
        self._threads.shutdown(wait=False)
        await self._client.close()

    def _request(
        self, request_id: str, token_ids: list[int], params: SamplingParams, priority: int, cache_salt: str | None
    ) -> AddRequest:
        assert params.n == 1, params.n
        if request_id in self._mailboxes:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            eos_token_ids=self.checkpoint.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _forget(self, request_ids: list[str], *, in_core: bool) -> None:
        for request_id in request_ids:
            del self._mailboxes[request_id]
        if request_ids and in_core and not self.is_dead:
            self._client.send(AbortRequests(request_ids))

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
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
