"""`AsyncEngine`: the engine as the server sees it. Text in this process, tokens in the core's. Imports no torch."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Literal, TypeVar

from configs.errors import EngineDead, InvalidRequest
from configs.sampling import SamplingParams
from configs.settings import EngineConfig

from .beam_search import beam_search
from .checkpoints import Checkpoint
from .core_client import CORE, CoreClient
from .input_processor import InputProcessor, RenderedChat
from .messages import AbortRequests, AddRequest, CoreReady, TokenLogprobs, TokenOutput
from .output_mailbox import Mailbox
from .output_processor import OutputProcessor
from .outputs import CompletionOutput, OutputBatch, RequestOutput
from .text.detokenizer import Detokenizer
from .text.tokenizer import Tokenizer

Result = TypeVar("Result")

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

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return await self._in_thread(lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template in use."""
        return self._inputs.chat_template

    async def render_chat(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> RenderedChat:
        """See `InputProcessor.render_chat`."""
        return await self._in_thread(lambda: self._inputs.render_chat(messages, **kwargs))

    async def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """See `InputProcessor.encode_infill`."""
        return await self._in_thread(lambda: self._inputs.encode_infill(prefix, suffix))

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
        interval: int = 1,
    ) -> AsyncGenerator[OutputBatch, None]:
        """Differences as they come, each choice's last with a finish reason. Fan out with `params.for_choice`.

        Behind a choice's first tokens, nothing comes before it has `interval` more or ends.
        Closing or cancelling the generator aborts what still runs. Raises `EngineDead`, `RequestFailed`, or the
        `InvalidRequest` with which the core refuses.
        """
        if self._death is not None:
            raise EngineDead(self._death)
        running: dict[str, tuple[int, OutputProcessor]] = {}
        mailbox = Mailbox(interval)
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

    async def embed(
        self,
        prompts: Sequence[list[int]],
        *,
        request_id: str,
        pooling: Literal["last", "mean"],
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[list[float]]:
        """An embedding of each prompt, see `SamplingParams.pooling`; not scaled to length 1.

        Cancelling aborts what still runs. Raises what `generate_many` does.
        """
        params = SamplingParams(max_tokens=0, pooling=pooling)
        choices = [(token_ids, params) for token_ids in prompts]
        embeddings: list[list[float]] = [[] for _ in prompts]
        batches = self.generate_many(choices, request_id=request_id, priority=priority, cache_salt=cache_salt)
        async with aclosing(batches):
            async for batch in batches:
                for index, output in batch:
                    assert output.embedding is not None, output
                    embeddings[index] = output.embedding
        return embeddings

    async def beam_search(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        length_penalty: float,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[CompletionOutput]:
        """The `params.n` best sequences of max_tokens tokens at most, best first; see `engine/beam_search.py`.

        n is at most `MAX_LOGPROBS` / 2. Of the parameters only max_tokens, ignore_eos and skip_special_tokens apply.
        """
        one_token = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * params.n, ignore_eos=True)
        steps = itertools.count()

        async def next_tokens(sequences: Sequence[list[int]]) -> list[TokenLogprobs]:
            found: dict[int, TokenLogprobs] = {}
            batches = self.generate_many(
                [(prompt_token_ids + sequence, one_token) for sequence in sequences],
                request_id=f"{request_id}-{next(steps)}",
                priority=priority,
                cache_salt=cache_salt,
            )
            async with aclosing(batches):
                async for batch in batches:
                    found |= {index: output.logprobs[0] for index, output in batch if output.logprobs}
            return [found[index] for index in range(len(sequences))]

        limit = self.info.max_model_len - len(prompt_token_ids)
        beams = await beam_search(
            next_tokens,
            width=params.n,
            max_tokens=limit if params.max_tokens is None else params.max_tokens,
            length_penalty=length_penalty,
            eos_token_ids=() if params.ignore_eos else self.checkpoint.eos_token_ids,
        )
        outputs = []
        for index, beam in enumerate(beams):
            reason = "stop" if beam.ended else "length"
            text = Detokenizer(self.tokenizer, prompt_token_ids, params).push(beam.token_ids, reason).text
            outputs.append(CompletionOutput(index, text, beam.token_ids, finish_reason=reason))
        return outputs

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
            sampling_params=self._inputs.prepare(params),
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

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
