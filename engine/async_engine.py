"""`AsyncEngine`: the engine as the server sees it. Text in this process, tokens in the core's. Imports no torch."""

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from configs.errors import DeadlinePassed, InvalidRequest, Unavailable
from configs.sampling import SamplingParams
from configs.settings import EngineConfig

from .admission import WaitingRoom
from .async_inputs import AsyncInputs
from .beam_search import beam_search
from .core_client import CORE
from .input_processor import InputProcessor
from .messages import AbortRequests, AddRequest, Snapshot, StepStats, TokenLogprobs, TokenOutput
from .observer import Observer
from .output_mailbox import Mailbox
from .output_processor import OutputProcessor
from .outputs import CompletionOutput, OutputBatch, RequestOutput
from .supervisor import EngineHealth, Supervision, Supervisor

_GRACE = 0.5
"""Seconds behind a deadline after which a request ends though the core has not said so."""

_CHOICES_AT_ONCE = 64
"""Of a request, which are begun or read before others get their turn."""


class EngineOptions(TypedDict, total=False):
    """Keywords of all that generates."""

    priority: int
    """Lower runs first under the scheduling policy `priority`; 0 unless given."""
    cache_salt: str | None
    """Requests share cached prefixes only with equal salts."""
    deadline: float | None
    """Of time.monotonic(): what still runs then ends as it is, with finish reason `timeout`."""


@dataclass(frozen=True, slots=True)
class _Choice:
    index: int
    processor: OutputProcessor
    begun: Any
    """What the observer knows it by."""


class AsyncEngine(AsyncInputs):
    """Many requests at once, each an async generator over one mailbox; one core process, which is replaced when it
    ends if `supervision` says so. What runs then fails; everything on this side goes on."""

    def __init__(self, supervisor: Supervisor, inputs: InputProcessor, waiting_room: WaitingRoom) -> None:
        super().__init__(inputs, lambda: supervisor.info)
        self._supervisor = supervisor
        self._waiting_room = waiting_room
        self._waiting_for_core = waiting_room.another()
        """The requests that wait for a core that is being started, or is frozen."""
        self._mailboxes: dict[str, Mailbox] = {}
        self._leaving: set[str] = set()
        """Ids of aborted requests of which the core may still send something."""
        self.observer = Observer()
        supervisor.on_outputs = self._deliver
        supervisor.on_end = self.end_all

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        core: Sequence[str] = CORE,
        *,
        supervision: Supervision | None = None,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
    ) -> "AsyncEngine":
        """Start the core and load the tokenizer meanwhile. Raises `UsageError` with one line that says why not.

        Without `supervision` the engine dies with its core; without bounds, any number of requests may wait.
        """
        supervisor = Supervisor(config, core, supervision or Supervision())
        await supervisor.launch()
        try:
            inputs = await asyncio.to_thread(InputProcessor, config)
            by_priority = config.scheduling_policy == "priority"
            room = WaitingRoom(max_queued_requests, max_queued_tokens, by_priority=by_priority)
            engine = cls(supervisor, inputs, room)
            await supervisor.wait_ready()
        except BaseException:
            await supervisor.close("the engine has not started")
            raise
        return engine

    @property
    def is_dead(self) -> bool:
        """True once there is no core process and will not be one; every request fails from then on."""
        return self._supervisor.is_dead

    async def wait_death(self) -> str:
        """Wait until the engine is dead; says why, in one line."""
        return await asyncio.shield(self._supervisor.death)

    def health(self) -> EngineHealth:
        """How the core is; it is not asked, so this takes no time."""
        return self._supervisor.health()

    def stats(self) -> StepStats:
        """What the core told last, and counters since this engine's start."""
        return self._supervisor.stats()

    async def snapshot(self) -> Snapshot:
        """All requests and blocks at one moment, when the core's step is over. Raises `Unavailable`."""
        return await self._supervisor.snapshot()

    @property
    def num_restarts(self) -> int:
        """Of the core, since this engine's start."""
        return self._supervisor.num_restarts

    @property
    def pid(self) -> int:
        """Of the core, or of the latest one."""
        return self._supervisor.client.pid

    def check_room(self, num_requests: int, num_tokens: int, priority: int = 0) -> None:
        """Raise `QueueFull` if requests of so many tokens cannot wait for their turn now."""
        room = self._waiting_room if self._supervisor.is_available else self._waiting_for_core
        room.check(num_requests, num_tokens, priority)

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, *, request_id: str, **options: Unpack[EngineOptions]
    ) -> AsyncGenerator[RequestOutput, None]:
        """`generate_many` of a single choice."""
        batches = self.generate_many([(prompt_token_ids, params)], request_id=request_id, **options)
        async with aclosing(batches):
            async for batch in batches:
                for _, output in batch:
                    yield output

    async def generate_many(
        self,
        choices: Sequence[tuple[list[int], SamplingParams]],
        *,
        request_id: str,
        interval: int = 1,
        has_room: bool = False,
        **options: Unpack[EngineOptions],
    ) -> AsyncGenerator[OutputBatch, None]:
        """Differences as they come, each choice's last with a finish reason. Fan out with `params.for_choice`.

        Behind a choice's first tokens, nothing comes before it has `interval` more or ends.
        With `has_room`, `check_room` has let them in: they are not refused for the queue any more.
        Closing or cancelling the generator aborts what still runs. Raises `Unavailable` (among them `EngineDead`),
        `QueueFull`, `RequestFailed`, or the `InvalidRequest` with which the core refuses.
        """
        await self._wait_for_core(request_id, [len(token_ids) for token_ids, _ in choices], has_room, options)
        mailbox, waiting = Mailbox(interval), self._waiting_room.places
        with self._running(mailbox, options.get("deadline")) as running:
            await self._begin(choices, request_id, mailbox, running, options)
            while running:
                batch = []
                for count, tokens in enumerate(await mailbox.take(), start=1):
                    if count % _CHOICES_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    if (choice := running.get(tokens.request_id)) is None:
                        continue  # its end was here, unread, when its deadline came
                    output = choice.processor.process(tokens)
                    batch.append((choice.index, output))
                    if output.finish_reason is not None:  # now, not when the reader comes back
                        self._end(running.pop(tokens.request_id), mailbox, tokens, output)
                    elif tokens.request_id in waiting:
                        self._waiting_room.leave(tokens.request_id)
                yield batch

    async def embed(
        self,
        prompts: Sequence[list[int]],
        *,
        request_id: str,
        pooling: Literal["last", "mean"],
        **options: Unpack[EngineOptions],
    ) -> list[list[float]]:
        """An embedding of each prompt, see `SamplingParams.pooling`; not scaled to length 1.

        Cancelling aborts what still runs. Raises what `generate_many` does, and `DeadlinePassed`.
        """
        params = SamplingParams(max_tokens=0, pooling=pooling)
        choices = [(token_ids, params) for token_ids in prompts]
        embeddings: list[list[float]] = [[] for _ in prompts]
        batches = self.generate_many(choices, request_id=request_id, **options)
        async with aclosing(batches):
            async for batch in batches:
                for index, output in batch:
                    if output.embedding is None:
                        raise DeadlinePassed()
                    embeddings[index] = output.embedding
        return embeddings

    async def beam_search(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        length_penalty: float,
        request_id: str,
        **options: Unpack[EngineOptions],
    ) -> list[CompletionOutput]:
        """The `params.n` best sequences of max_tokens tokens at most, best first; see `engine/beam_search.py`.

        n is at most `MAX_LOGPROBS` / 2. Of the parameters only max_tokens, ignore_eos and skip_special_tokens apply.
        Raises what `generate_many` does, and `DeadlinePassed`.
        """
        one_token = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * params.n, ignore_eos=True)
        steps = itertools.count()

        async def next_tokens(sequences: Sequence[list[int]]) -> list[TokenLogprobs]:
            found: dict[int, TokenLogprobs] = {}
            step = next(steps)
            batches = self.generate_many(
                [(prompt_token_ids + sequence, one_token) for sequence in sequences],
                request_id=f"{request_id}-{step}",
                has_room=step > 0,  # what was begun is not refused
                **options,
            )
            async with aclosing(batches):
                async for batch in batches:
                    found |= {index: output.logprobs[0] for index, output in batch if output.logprobs}
            if len(found) < len(sequences):
                raise DeadlinePassed()
            return [found[index] for index in range(len(sequences))]

        limit = self.info.max_model_len - len(prompt_token_ids)
        beams = await beam_search(
            next_tokens,
            width=params.n,
            max_tokens=limit if params.max_tokens is None else params.max_tokens,
            length_penalty=length_penalty,
            eos_token_ids=() if params.ignore_eos else self.tokenizer.eos_token_ids,
        )
        outputs = []
        for index, beam in enumerate(beams):
            reason = "stop" if beam.ended else "length"
            whole = TokenOutput(request_id=request_id, new_token_ids=beam.token_ids, finish_reason=reason)
            text = OutputProcessor(self.tokenizer, prompt_token_ids, params).process(whole).text
            logprob = beam.sum_logprobs
            outputs.append(
                CompletionOutput(index, text, beam.token_ids, finish_reason=reason, cumulative_logprob=logprob)
            )
        return outputs

    async def shutdown(self) -> None:
        """End the core process; requests that still run fail with `EngineDead`."""
        self.close_threads()
        await self._supervisor.close("the engine has been shut down")

    async def _wait_for_core(
        self, request_id: str, sizes: Sequence[int], has_room: bool, options: EngineOptions
    ) -> None:
        """Return when choices of so many tokens may be sent to a core. Raises `QueueFull` unless they have room."""
        priority = options.get("priority", 0)
        if not has_room:
            self.check_room(len(sizes), sum(sizes), priority)
        if self._supervisor.is_available:
            return
        with self._waiting_for_core.entered(request_id, sizes, priority):
            await self._supervisor.wait_available(options.get("deadline"))
        if not has_room:
            self.check_room(len(sizes), sum(sizes), priority)

    @contextlib.contextmanager
    def _running(self, mailbox: Mailbox, deadline: float | None) -> Iterator[dict[str, _Choice]]:
        """The choices of a request that run, by their ids in the core; at the end, what still does is aborted.

        What still does some time behind the `deadline` ends then: the core, which should have ended it, is not at it.
        """
        running: dict[str, _Choice] = {}

        def end() -> None:
            for request_id in running:
                mailbox.put(TokenOutput(request_id=request_id, finish_reason="timeout"))
            self._abort(self._known(mailbox, running))

        timer = None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(deadline - time.monotonic() + _GRACE, end)
        try:
            yield running
        finally:
            self._forget(mailbox, list(running), in_core=True)
            reason = "abort" if isinstance(sys.exception(), GeneratorExit | asyncio.CancelledError) else "error"
            for name, choice in running.items():
                num_tokens = choice.processor.num_output_tokens + mailbox.untaken(name)
                self.observer.ended(choice.begun, reason, num_tokens, None)
            if timer is not None:
                timer.cancel()

    async def _begin(
        self,
        choices: Sequence[tuple[list[int], SamplingParams]],
        request_id: str,
        mailbox: Mailbox,
        running: dict[str, _Choice],
        options: EngineOptions,
    ) -> None:
        for index, (token_ids, params) in enumerate(choices):
            if index % _CHOICES_AT_ONCE == _CHOICES_AT_ONCE - 1:
                await asyncio.sleep(0)
            request = self._request(f"{request_id}-{index}", token_ids, params, **options)
            processor = OutputProcessor(self.tokenizer, token_ids, params)
            running[request.request_id] = _Choice(index, processor, self.observer.began(request))
            self._mailboxes[request.request_id] = mailbox
            self._waiting_room.enter(request.request_id, len(token_ids), request.priority)
            self._supervisor.send(request)

    def _request(
        self, request_id: str, token_ids: list[int], params: SamplingParams, **options: Unpack[EngineOptions]
    ) -> AddRequest:
        assert params.n == 1, params.n
        while request_id in self._leaving:
            request_id += "'"
        if request_id in self._mailboxes:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=self._inputs.prepare(params),
            eos_token_ids=self.tokenizer.eos_token_ids,
            **options,
        )

    def _end(self, choice: _Choice, mailbox: Mailbox, tokens: TokenOutput, output: RequestOutput) -> None:
        """The choice has ended with `output`, which was made of `tokens`. Of a stop string the core knows nothing."""
        assert output.finish_reason is not None
        self.observer.ended(choice.begun, output.finish_reason, output.num_output_tokens, tokens.timeline)
        self._forget(mailbox, [tokens.request_id], in_core=tokens.finish_reason is None)
        self._supervisor.note_answer()

    def _forget(self, mailbox: Mailbox, request_ids: list[str], *, in_core: bool) -> None:
        known = self._known(mailbox, request_ids)
        for request_id in known:
            del self._mailboxes[request_id]
            self._waiting_room.leave(request_id)
        if in_core:
            self._abort(known)

    def _known(self, mailbox: Mailbox, request_ids: Iterable[str]) -> list[str]:
        """Less those whose core has ended: they are forgotten already, and their ids may be others' by now."""
        return [request_id for request_id in request_ids if self._mailboxes.get(request_id) is mailbox]

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._leaving.update(request_ids)
            self._supervisor.send(AbortRequests(request_ids))

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason == "abort":
                self._leaving.discard(output.request_id)
            elif mailbox := self._mailboxes.get(output.request_id):
                mailbox.put(output)
        self.observer.stepped(outputs, self._supervisor.client.stats)

    def end_all(self, error: Unavailable) -> None:
        """End all requests with `error`."""
        mailboxes, self._mailboxes = self._mailboxes, {}
        self._leaving.clear()
        self._waiting_room.clear()
        for mailbox in mailboxes.values():
            mailbox.die(error)
