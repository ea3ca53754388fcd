"""`LLM`: the engine for scripts. What the server asks of `AsyncEngine`, without an event loop of the caller's."""

import asyncio
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import msgspec

from configs.errors import EngineDead, RequestError, SettingsError
from configs.sampling import BeamSearchParams, SamplingParams
from configs.settings import EngineConfig
from configs.sources import did_you_mean, resolve

from .async_engine import AsyncEngine
from .outputs import CompletedRequest, CompletionOutput, OutputBatch

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
"""Of each prompt, or of all; None: the checkpoint's own."""
Result = TypeVar("Result")


class RequestOptions(TypedDict, total=False):
    """Keywords of all that runs requests, which hold for each of the call's prompts."""

    priority: int
    """Lower runs first under the scheduling policy `priority`."""
    timeout: float
    """Seconds after which a request ends as it is, with finish reason `timeout`; without a part that would be of use,
    `DeadlinePassed` is raised."""
    cache_salt: str
    """Requests share cached prefixes only with equal salts."""


class LLM:
    """Batches of prompts in, completed requests out.

        llm = LLM("path/to/checkpoint", max_model_len=2048)
        [request] = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
        print(request.outputs[0].text)

    The keywords are the fields of `EngineConfig`. Raises `UsageError` when they do not fit the checkpoint. The model is
    in a process of its own, which ends with `close`, with the object or with the script. Methods may be called from any
    thread. They raise `InvalidRequest` before anything runs, and `EngineDead` when that process has ended.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        known = {field.name for field in msgspec.structs.fields(EngineConfig)}
        for name in settings:
            if name not in known:
                raise SettingsError(f"unknown setting {name}{did_you_mean(name, known)}")
        config = resolve(EngineConfig, flags={"model": model, **settings})
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="octavo-llm", daemon=True)
        thread.start()
        engines: list[AsyncEngine] = []
        self.close = weakref.finalize(self, _close, self._loop, thread, engines)
        """End the engine."""
        try:
            self._engine = self._run(AsyncEngine.start(config))
        except BaseException:
            self.close()
            raise
        engines.append(self._engine)
        self._request_ids = map(str, itertools.count())
        self.info = self._engine.info
        self.tokenizer = self._engine.tokenizer
        self.default_sampling = self._engine.default_sampling

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> list[CompletedRequest]:
        """Complete every prompt, a text or token ids, each with its own parameters or all with the same.

        Results are in the order of the prompts. Without parameters, the checkpoint's own apply. A request that fails
        has finish reason `error`.
        """
        return self._complete(self._run(self._encoded(prompts)), sampling_params, options)

    def stream(
        self, prompts: Prompts, sampling_params: Params = None, **options: Unpack[RequestOptions]
    ) -> Iterator[CompletedRequest]:
        """As `generate`, but gives a request whenever it has got more, until all are finished.

            for request in llm.stream("Once upon a time"):
                print(request.outputs[0].delta, end="", flush=True)

        It is the same object each time, with all that has come until then. Closing the iterator ends what still runs.
        """
        return self._stream(self._run(self._encoded(prompts)), sampling_params, options)

    def chat(self, messages: Sequence[Any], sampling_params: Params = None, **keywords: Any) -> list[CompletedRequest]:
        """Answer one chat (a list of messages) or several (a list of such lists). Keywords that are not those of
        `RequestOptions` are for the chat template."""
        options = _taken_options(keywords)
        return self._complete(self._run(self._rendered(messages, keywords)), sampling_params, options)

    def stream_chat(
        self, messages: Sequence[Any], sampling_params: Params = None, **keywords: Any
    ) -> Iterator[CompletedRequest]:
        """As `chat`, given as `stream` does."""
        options = _taken_options(keywords)
        return self._stream(self._run(self._rendered(messages, keywords)), sampling_params, options)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, **options: Unpack[RequestOptions]
    ) -> list[CompletedRequest]:
        """The `params.beam_width` likeliest outputs of each prompt, best first."""
        requests = self._run(self._encoded(prompts))
        sampling = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        self._validate(requests, [sampling] * len(requests))

        async def search(request: CompletedRequest) -> None:
            request.outputs = await self._engine.beam_search(
                request.prompt_token_ids,
                sampling,
                length_penalty=params.length_penalty,
                request_id=next(self._request_ids),
                **_engine_options(options),
            )

        self._run(_all(map(search, requests)))
        return requests

    def embed(
        self, prompts: Prompts, pooling: Literal["last", "mean"] | None = None, **options: Unpack[RequestOptions]
    ) -> list[list[float]]:
        """The final hidden state of each prompt's last token, or the mean over its tokens; not scaled to length 1.
        Without `pooling`, the checkpoint says which. Raises `RequestFailed` when one of them fails.
        """
        requests = self._run(self._encoded(prompts))
        pooling = pooling or self._engine.default_pooling
        self._validate(requests, [SamplingParams(max_tokens=0, pooling=pooling)] * len(requests))
        token_ids = [request.prompt_token_ids for request in requests]
        request_id = next(self._request_ids)
        return self._run(
            self._engine.embed(token_ids, request_id=request_id, pooling=pooling, **_engine_options(options))
        )

    def _complete(
        self, requests: list[CompletedRequest], params: Params, options: RequestOptions
    ) -> list[CompletedRequest]:
        deque(self._stream(requests, params, options, whole=True), maxlen=0)
        return requests

    def _stream(
        self, requests: list[CompletedRequest], params: Params, options: RequestOptions, *, whole: bool = False
    ) -> Iterator[CompletedRequest]:
        """With `whole`, requests come as rarely as their stop strings allow, which only this side looks for."""
        of_each = self._params_of_each(requests, params)
        queue: SimpleQueue[tuple[CompletedRequest, OutputBatch | RequestError] | None] = SimpleQueue()

        async def follow(request: CompletedRequest, each: SamplingParams) -> None:
            batches = self._engine.generate_many(
                [(request.prompt_token_ids, each.for_choice(index)) for index in range(each.n)],
                request_id=next(self._request_ids),
                interval=sys.maxsize if whole and not each.stop else 1,
                **_engine_options(options),
            )
            try:
                async with aclosing(batches):
                    async for batch in batches:
                        queue.put((request, batch))
            except EngineDead:
                raise
            except RequestError as error:
                queue.put((request, error))

        def taken() -> Iterator[CompletedRequest]:
            work = self._begin(_all(map(follow, requests, of_each)))
            work.add_done_callback(lambda _: queue.put(None))
            try:
                while (item := queue.get()) is not None:
                    request, batch = item
                    request.extend(batch)
                    yield request
                work.result()
            finally:
                work.cancel()

        return taken()

    async def _encoded(self, prompts: Prompts) -> list[CompletedRequest]:
        requests = []
        for prompt in _as_list(prompts):
            text = prompt if isinstance(prompt, str) else None
            token_ids = await self._engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
            requests.append(CompletedRequest(text, token_ids))
        return requests

    async def _rendered(self, messages: Sequence[Any], template_kwargs: dict[str, Any]) -> list[CompletedRequest]:
        chats = [messages] if messages and isinstance(messages[0], Mapping) else messages
        rendered = [await self._engine.render_chat(chat, **template_kwargs) for chat in chats]
        return [CompletedRequest(text, token_ids) for text, token_ids in rendered]

    def _params_of_each(self, requests: list[CompletedRequest], params: Params) -> list[SamplingParams]:
        """Checked; the requests get a place for each choice."""
        if params is None:
            params = SamplingParams(**self.default_sampling)
        of_each = [params] * len(requests) if isinstance(params, SamplingParams) else list(params)
        if len(of_each) != len(requests):
            raise ValueError(f"{len(of_each)} sampling parameters for {len(requests)} prompts")
        self._validate(requests, of_each)
        for request, each in zip(requests, of_each, strict=True):
            request.outputs = [CompletionOutput(index) for index in range(each.n)]
        return of_each

    def _validate(self, requests: list[CompletedRequest], params: list[SamplingParams]) -> None:
        for request, each in zip(requests, params, strict=True):
            self._engine.validate(request.prompt_token_ids, each)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work` in the engine's thread; an interrupt ends it there too."""
        future = self._begin(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def _begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if not self.close.alive:
            work.close()
            raise EngineDead("the engine has been closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _all(work: Iterator[Coroutine[Any, Any, None]]) -> None:
    """Begun in order; where one fails, the others end too."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _taken_options(keywords: dict[str, Any]) -> RequestOptions:
    """The options among the keywords, which loses them."""
    names = keywords.keys() & RequestOptions.__annotations__.keys()
    return cast(RequestOptions, {name: keywords.pop(name) for name in names})


def _engine_options(options: RequestOptions) -> dict[str, Any]:
    """As `AsyncEngine` takes them."""
    rest: dict[str, Any] = dict(options)
    timeout = rest.pop("timeout", None)
    return rest if timeout is None else {**rest, "deadline": time.monotonic() + timeout}


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread, engines: list[AsyncEngine]) -> None:
    async def end() -> None:
        try:
            for engine in engines:
                await engine.shutdown()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:  # calls that fail now, or a start cut short
                await asyncio.wait(others)
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:  # where the last reference may have been
        thread.join()
        loop.close()


def _as_list(prompts: Prompts) -> list[Prompt]:
    """A single text, or a single list of token ids, is one prompt."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
