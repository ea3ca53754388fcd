"""`EngineCore`: one model on one device, and the step. Knows no text, no clients, no threads."""

import logging
import random
import time
from collections import deque
from collections.abc import Iterable

from configs.errors import InvalidRequest, RequestError, RequestFailed
from configs.settings import EngineConfig
from scheduler.output import SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

from .messages import AddRequest, CoreReady, RequestSnapshot, Snapshot, StepStats, TokenOutput
from .model_runner import ModelRunner, StepResult, StepUnderWay
from .models.config import ModelConfig, rope_cache_key
from .prompt_reader import PromptAnswer
from .structured.language import Languages

logger = logging.getLogger("octavo.engine")

_MAX_WAITING_SHOWN = 256
"""Each costs microseconds between two steps, and on its way to whoever watches."""
_NO_ANSWER = PromptAnswer()
_NO_RESULT = StepResult({}, {}, {}, {}, set())


class EngineCore:
    """Requests in, tokens out, one step at a time. Not thread-safe: whoever calls `step` owns the core.

    `engine.start.start_core` makes one, of a checkpoint.
    """

    ready: CoreReady
    """What was loaded."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        scheduler: Scheduler,
        runner: ModelRunner,
        languages: Languages,
    ) -> None:
        self.scheduler = scheduler
        self._model_config = model_config
        self._runner = runner
        self._languages = languages
        self._random = random.Random(config.seed)
        self._most_under_way = int(config.async_scheduling or 0)
        self._under_way: deque[tuple[SchedulerOutput, StepUnderWay, float]] = deque()  # launched, not booked
        self._last_step = (0, 0.0, 0.0)  # its tokens, begin and end

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._languages.num_waiting > 0 or bool(self._under_way)

    def add_request(self, message: AddRequest) -> TokenOutput | None:
        """Queue a request; a refusal comes back as its only output."""
        seed = message.sampling_params.seed
        extra_keys = []
        if rope_key := rope_cache_key(self._model_config, len(message.prompt_token_ids)):
            extra_keys.append(f"rope {rope_key}")
        if message.cache_salt is not None:
            extra_keys.append(f"salt {message.cache_salt}")
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            message.sampling_params,
            arrival_time=time.monotonic(),
            eos_token_ids=message.eos_token_ids,
            priority=message.priority,
            extra_keys=tuple(extra_keys),
            seed=self._random.getrandbits(64) if seed is None else seed % 2**64,
            deadline=message.deadline,
        )
        if message.sampling_params.structured is None or not request.wants_output:
            return self._enqueue(request)
        if request.request_id in self._languages:
            return _refusal(request, InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id"))
        self._languages.want(request)
        return None

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget these requests, without an output; their blocks are free at once."""
        request_ids = list(request_ids)
        self._languages.forget(request_ids)
        self.scheduler.abort_requests(request_ids)

    def step(self) -> list[TokenOutput]:
        """Move every running request on by a chunk or a token. Call while `has_work`.

        A step is launched, and then the one before it is waited for, or, where steps are not overlapped, the same one.
        A request whose language is still compiled waits outside of the scheduler.
        """
        outputs = self._enqueue_compiled()
        if not self.scheduler.has_work and not self._under_way:
            return outputs
        start = time.monotonic()
        outputs += self._end_expired(start)
        scheduled = self.scheduler.schedule(start)
        launched = self._runner.launch(scheduled)
        if launched is not None:
            self._under_way.append((scheduled, launched, start))
        while len(self._under_way) > (0 if launched is None else self._most_under_way):
            scheduled, ahead, start = self._under_way.popleft()
            result = self._runner.collect(ahead)
            now = time.monotonic()
            updates = self.scheduler.update_from_output(scheduled, result.token_ids, result.failed, result.complete)
            self._last_step = (scheduled.num_scheduled_tokens, max(start, self._last_step[2]), now)
            self._note(updates, result, now)
            outputs += [_token_output(request, new, result) for request, new in updates]
        return outputs

    def _note(self, updates: list[tuple[Request, list[int]]], result: StepResult, now: float) -> None:
        """Log lines and timelines of what was booked; languages that are done with."""
        for request_id, reason in result.failed.items():
            level = logging.INFO if request_id in result.refused else logging.ERROR
            logger.log(level, "request %s failed: %s", request_id, reason)
        self._languages.forget(request.request_id for request, _ in updates if request.is_finished)
        for request, new in updates:
            if new and request.timeline.first_token is None:
                request.timeline.note_first_token(now, self.scheduler.counters)
            if request.is_finished:
                request.timeline.note_end(now, self.scheduler.counters)

    def _end_expired(self, now: float) -> list[TokenOutput]:
        """Before they are computed any further; what is under way for them is passed over when it is booked."""
        expired = self.scheduler.end_expired(now)
        self._languages.forget(request.request_id for request in expired)
        for request in expired:
            request.timeline.note_end(now, self.scheduler.counters)
        return [_token_output(request, [], _NO_RESULT) for request in expired]

    def stats(self) -> StepStats:
        tokens, begin, end = self._last_step
        return StepStats(
            time=end,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + self._languages.num_waiting,
            num_used_blocks=self.scheduler.num_used_blocks,
            step_seconds=end - begin,
            step_tokens=tokens,
            wait_cause=self.scheduler.wait_cause,
            counters=self.scheduler.counters,
        )

    def snapshot(self) -> Snapshot:
        """Costs time in proportion to the blocks of the cache; of those that wait, it shows the first ones."""
        scheduler = self.scheduler
        waiting = scheduler.waiting[:_MAX_WAITING_SHOWN]
        requests = [_request_snapshot(request) for request in (*scheduler.running, *waiting)]
        return Snapshot(self.stats(), requests, scheduler.kv.pool.states())

    def _enqueue(self, request: Request) -> TokenOutput | None:
        try:
            self.scheduler.add_request(request)
        except InvalidRequest as error:
            return _refusal(request, error)
        return None

    def _enqueue_compiled(self) -> list[TokenOutput]:
        """Hand the scheduler the requests whose language is there; returns the outputs of the refused ones."""
        refusals = []
        for request, reason in self._languages.take(wait=not self.scheduler.has_work):
            if reason is not None:
                refusals.append(_refusal(request, reason))
            elif refusal := self._enqueue(request):
                self._languages.forget([request.request_id])
                refusals.append(refusal)
        return refusals


def _refusal(request: Request, error: RequestError) -> TokenOutput:
    return TokenOutput(
        request_id=request.request_id,
        finish_reason="error",
        error=error.message,
        error_type=type(error).__name__,
        error_param=error.param,
    )


def _request_snapshot(request: Request) -> RequestSnapshot:
    return RequestSnapshot(
        request.request_id,
        request.status is RequestStatus.RUNNING,
        request.num_prompt_tokens,
        request.num_tokens,
        request.num_computed_tokens,
        request.block_ids,
        request.timeline,
    )


def _token_output(request: Request, new_token_ids: list[int], result: StepResult) -> TokenOutput:
    entry = result.logprobs.get(request.request_id) if new_token_ids else None
    tells_timeline = request.is_finished or (bool(new_token_ids) and not request.timeline.is_told)
    request.timeline.is_told |= tells_timeline
    prompt = result.prompts.get(request.request_id, _NO_ANSWER)
    is_refused = request.request_id in result.refused
    return TokenOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        logprobs=[entry] if entry else None,
        prompt_logprobs=prompt.logprobs,
        embedding=prompt.embedding,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        timeline=request.timeline if tells_timeline else None,
        error=request.error,
        error_type=(InvalidRequest if is_refused else RequestFailed).__name__,
        error_param="structured" if is_refused and request.sampling_params.structured else None,
    )
