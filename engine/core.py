"""`EngineCore`: one model on one device, and the step. Knows no text, no clients, no threads."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from configs.errors import InvalidRequest, RequestError, RequestFailed, SettingsError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from scheduler.output import SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

from .bundled import locate_model
from .checkpoints import open_checkpoint
from .device import device_name, resolved, select_device, set_threads
from .input_batch import InputBatch
from .kv_cache import plan_num_blocks
from .loading import LoadedModel, load_model
from .machine import usable_cores
from .memory_profile import measured_free_bytes
from .messages import AddRequest, CoreReady, RequestSnapshot, Snapshot, StepStats, TokenOutput
from .model_runner import ModelRunner, StepResult, StepUnderWay
from .models.config import ModelConfig, rope_cache_key
from .prompt_reader import PromptAnswer
from .structured.compiler import load_compiler
from .structured.languages import Languages
from .structured.trial import TrialProcess

logger = logging.getLogger("octavo.engine")

T = TypeVar("T")

_MAX_WAITING_SHOWN = 256
"""Each costs microseconds between two steps, and on its way to whoever watches."""
_NO_ANSWER = PromptAnswer()
_NO_RESULT = StepResult({}, {}, {}, {}, set())


class EngineCore:
    """Requests in, tokens out, one step at a time.

    `ready` tells what was loaded. Not thread-safe: whoever calls `step` owns the core.
    """

    ready: CoreReady

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and answer one small request, so that the first real one is not slow.

        Raises `UsageError` when the settings, the checkpoint and the machine do not go together.
        """
        config = resolved(config, select_device(config.device))
        self._config = config
        self._timings: dict[str, float] = {}
        self._notes: list[str] = []
        self._random = random.Random(config.seed)
        num_threads = config.num_threads or usable_cores()
        set_threads(num_threads)
        checkpoint = self._timed("checkpoint", lambda: open_checkpoint(locate_model(config.model)))
        self._model_config = checkpoint.config
        max_model_len = max_context(config, checkpoint.config)
        model = self._timed("weights", lambda: load_model(config, checkpoint))
        spec, backend = model.spec, model.backend
        num_blocks = self._timed("kv_cache", lambda: self._allocate(model, max_model_len))
        windows = set(spec.windows)
        self.scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            sliding_window=windows.pop() if len(windows) == 1 else None,
        )
        self._most_under_way = int(config.async_scheduling or 0)
        self._under_way: deque[tuple[SchedulerOutput, StepUnderWay, float]] = deque()  # launched, not booked
        self._last_step = (0, 0.0, 0.0)  # its tokens, begin and end
        self._languages = Languages(lambda: load_compiler(config), TrialProcess(config))
        batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.block_size,
            language_of=self._languages.of,
            penalties=model.decoder.ops.make_penalties(checkpoint.config.vocab_size, spec.device),
        )
        self._runner = ModelRunner(model.decoder, backend, batch, spec.device, cuda_graphs=config.cuda_graphs)
        self._timed("warm_up", self._warm_up)
        self.ready = CoreReady(
            architecture=checkpoint.config.architecture,
            num_parameters=model.decoder.weights.num_parameters,
            weight_bytes=model.decoder.weights.bytes_per_step,
            kv_bytes_per_token=spec.block_bytes // spec.block_size,
            dtype=str(spec.dtype).removeprefix("torch."),
            kv_cache_dtype=str(spec.kv_cache_dtype or spec.dtype).removeprefix("torch."),
            quantization=model.quantization,
            device=device_name(spec.device),
            attention_backend=backend.name,
            notes=[*model.notes, *self._notes],
            vocab_size=checkpoint.config.vocab_size,
            max_model_len=max_model_len,
            kv_cache_tokens=(num_blocks - 1) * config.block_size,
            block_size=config.block_size,
            num_threads=num_threads,
            timings=self._timings,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._languages.has_work or bool(self._under_way)

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

    def _allocate(self, model: LoadedModel, max_model_len: int) -> int:
        num_blocks, notes = plan_num_blocks(
            self._config,
            block_bytes=model.spec.block_bytes,
            max_model_len=max_model_len,
            free_bytes=measured_free_bytes(model, self._config, max_model_len),
        )
        self._notes += notes
        model.backend.allocate(num_blocks)
        return num_blocks

    def _warm_up(self) -> None:
        """One request of several tokens, then one token: the libraries prepare what both kinds of step need."""
        length = min(8, self.scheduler.max_total_tokens - 2)
        if length < 1:
            return
        # top_p and a penalty: all kernels of sampling
        params = SamplingParams(max_tokens=2, seed=0, ignore_eos=True, top_p=0.9, repetition_penalty=1.1)
        self.add_request(AddRequest(request_id="warm-up", prompt_token_ids=[0] * length, sampling_params=params))
        while self.has_work:
            self.step()

    def _timed(self, phase: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self._timings[phase] = time.perf_counter() - start
        return result


def max_context(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of a request. Raises `SettingsError` when more are asked for than the checkpoint can tell apart."""
    limit = model.max_position_embeddings
    rope, scaling = model.rope.rope_type, model.rope.parameters
    if rope in ("linear", "dynamic"):  # their factor extends the length that is configured beside it
        limit = int(limit * scaling["factor"])
    elif rope == "yarn" and scaling.get("factor"):  # checkpoints give the length before or after the extension
        limit = max(limit, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
    if config.max_model_len is None:
        return limit
    if not 1 <= config.max_model_len <= limit:
        raise SettingsError(f"max_model_len must be between 1 and the checkpoint's {limit}; got {config.max_model_len}")
    return config.max_model_len


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
