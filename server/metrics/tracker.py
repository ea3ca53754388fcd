"""`RequestTracker`: the requests that run, and the latest that have ended."""

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from starlette.types import Scope

from configs.errors import InvalidRequest, QueueFull, RequestError, Unavailable, shown
from configs.settings import ServerConfig
from engine.messages import AddRequest, StepStats, TokenOutput
from engine.observer import Observer
from scheduler.timeline import Timeline
from server.metrics.prometheus import EngineMetrics
from server.metrics.records import CURRENT_REQUEST, ChoiceRecord, RequestRecord

logger = logging.getLogger("octavo.requests")
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_TRACE_HEADERS = (b"traceparent", b"tracestate")

WaitCause = tuple[float, str | None]
"""Since when requests wait for what; None: nobody waits."""


class RequestTracker(Observer):
    """Follows HTTP requests from their head to their end, and their choices through the engine."""

    def __init__(self, metrics: EngineMetrics, config: ServerConfig, model_name: str) -> None:
        self._metrics, self._max_kept, self._model_name = metrics, config.max_kept_timelines, model_name
        self._trace: Callable[[RequestRecord], None] | None = None
        if config.otlp_traces_endpoint is not None:
            from server.metrics.tracing import RequestTracer  # brings packages that few have

            self._trace = RequestTracer(config.otlp_traces_endpoint, model_name)
        self.wait_causes: deque[WaitCause] = deque([(0.0, None)], maxlen=1000)
        """The newest last."""
        self._running: dict[RequestRecord, None] = {}
        """In the order in which they came."""
        self._ended: deque[RequestRecord] = deque()
        self._num_kept = 0
        self._choices: dict[str, ChoiceRecord] = {}
        self._batch: list[ChoiceRecord] = []
        self._batch_ids: list[str] = []
        """Choices that got a token in the latest step, at `_batch_time`; their `last_token` is set when this ends."""
        self._batch_time = 0.0
        self._stats: StepStats | None = None

    def find(self, request_id: str, owner: str) -> RequestRecord | None:
        """This owner's by X-Request-Id or the answer's id; of several, the newest that runs, or else that ended."""
        newest_first = (*reversed(self._running), *reversed(self._ended))
        own = (record for record in newest_first if record.owner == owner)
        return next((record for record in own if request_id in (record.request_id, record.response_id)), None)

    def owner_of(self, choice_id: str) -> str | None:
        """The owner of a choice that runs; None for any other id."""
        choice = self._choices.get(choice_id)
        return choice.owner if choice else None

    @contextlib.contextmanager
    def track(self, scope: Scope) -> Iterator[RequestRecord]:
        """Around a request and its answer, which see its record as CURRENT_REQUEST."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        record = RequestRecord(time.monotonic(), time.time(), method)
        CURRENT_REQUEST.set(record)
        try:
            yield record
        finally:
            self._close(record)

    def begin_work(self, record: RequestRecord, scope: Scope) -> None:
        """The request may bring a body, and gets a timeline."""
        record.has_body = True
        if self._trace is not None:
            record.trace_context = {
                name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS
            }
        self._running[record] = None

    def claim(self, request_id: str) -> None:
        """For the current request, until it ends. Raises `InvalidRequest` if another of its owner has this id."""
        record = CURRENT_REQUEST.get()
        others = (one for one in self._running if one is not record)
        if any(one.claimed_id == request_id and one.owner == record.owner for one in others):
            raise InvalidRequest(f"request id {shown(request_id)} is in use", param="request_id")
        record.claimed_id = request_id

    def free_id(self, record: RequestRecord) -> None:
        """With the end of its answer, which a client may follow with a request of the same id."""
        if record.num_open == 1:
            record.claimed_id = None

    def keep_open(self) -> Callable[[], None]:
        """The current request does not end before the function that is returned was called."""
        record = CURRENT_REQUEST.get()
        record.num_open += 1
        return lambda: self._close(record)

    def note_error(self, record: RequestRecord, error: Exception, status: int) -> None:
        """The request is answered with this error."""
        record.status = status
        if not isinstance(error, RequestError):
            record.error = "server_error" if status >= 500 else None
            return
        record.error = error.code or error.type
        if isinstance(error, QueueFull | Unavailable) and not record.num_choices:
            refused = self._metrics.refused
            refused[error.code if error.code in refused else "engine"] += 1

    def _close(self, record: RequestRecord) -> None:
        record.num_open -= 1
        if record.num_open:
            return
        record.ended = time.monotonic()
        self._metrics.note_request(record)
        if not record.has_body:
            return
        del self._running[record]
        self._ended.append(record)
        self._num_kept += max(1, len(record.choices))
        while self._num_kept > self._max_kept:
            self._num_kept -= max(1, len(self._ended.popleft().choices))
        if logger.isEnabledFor(logging.INFO):
            fields = record.log_fields(self._model_name)
            logger.info("%s %s %d", record.method, record.route, record.status, extra={"fields": fields})
        if self._trace is not None:
            self._trace(record)

    def began(self, request: AddRequest) -> ChoiceRecord:
        self._end_batch()
        record, params = CURRENT_REQUEST.get(), request.sampling_params
        choice = ChoiceRecord(
            request_id=request.request_id,
            owner=record.owner,
            received=record.received,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            is_structured=params.structured is not None,
            timeline=Timeline(queued=time.monotonic()),
        )
        record.add(choice)
        self._choices[choice.request_id] = choice
        return choice

    def stepped(self, outputs: list[TokenOutput], stats: StepStats | None) -> None:
        """Costs little per token where a step gives one to the same choices as the step before."""
        if stats is not None:
            self._note_stats(stats)
        now = time.monotonic() if stats is None else stats.time
        ids = [output.request_id for output in outputs if output.new_token_ids]
        if ids and ids == self._batch_ids:
            self._metrics.inter_token.observe(now - self._batch_time, len(ids))
            self._metrics.num_generation_tokens += sum([len(output.new_token_ids) for output in outputs])
            self._batch_time = now
        elif outputs:
            self._note_new_batch(outputs, now)

    def ended(self, choice: ChoiceRecord, reason: str, num_output_tokens: int, timeline: Timeline | None) -> None:
        now = time.monotonic()
        self._end_batch()
        if self._choices.get(choice.request_id) is choice:
            del self._choices[choice.request_id]
        choice.ended, choice.finish_reason, choice.num_output_tokens = now, reason, num_output_tokens
        choice.timeline = timeline or choice.timeline
        if choice.timeline.ended is None and self._stats is not None:
            choice.timeline.note_end(now, self._stats.counters)  # it ended here, not in the core
        self._metrics.note_choice(choice)

    def _note_new_batch(self, outputs: list[TokenOutput], now: float) -> None:
        """Choices have come, gone or ended since the step before. Outputs may be of choices that have ended here."""
        self._end_batch()
        metrics, latest = self._metrics, []
        for output in outputs:
            if (choice := self._choices.get(output.request_id)) is None:
                continue
            if output.timeline is not None:
                choice.timeline, choice.num_cached_tokens = output.timeline, output.num_cached_tokens
            if output.new_token_ids:
                self._batch.append(choice)
                metrics.num_generation_tokens += len(output.new_token_ids)
                if choice.last_token is not None:
                    latest.append(choice.last_token)
                else:
                    choice.first_token = now
                    metrics.first_token.observe(time.monotonic() - choice.received)
                    metrics.num_prompt_tokens += choice.num_prompt_tokens
        for last_token, times in Counter(latest).items():
            metrics.inter_token.observe(now - last_token, times)
        self._batch_ids, self._batch_time = [choice.request_id for choice in self._batch], now

    def _end_batch(self) -> None:
        for choice in self._batch:
            choice.last_token = self._batch_time
        self._batch, self._batch_ids = [], []

    def _note_stats(self, stats: StepStats) -> None:
        if stats.step_tokens and (self._stats is None or stats.time != self._stats.time):
            self._metrics.note_step(stats)
        if stats.wait_cause != self.wait_causes[-1][1]:
            self.wait_causes.append((time.monotonic(), stats.wait_cause))
        self._stats = stats
