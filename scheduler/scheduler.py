"""`Scheduler`: who runs in the next step, and on which blocks.

The one idea: a request is *behind by n tokens*. A fresh prompt of 100 tokens is behind by 100, a prompt in the
middle of its chunks by what is left, a decoding request by 1, one that comes back from preemption by all that
the prefix cache does not hold. Each step spends one token budget on catching up, and no code asks which of
these cases it serves.

Order is the second idea. `running` and `waiting` are sorted, best first: by arrival (`fcfs`), or by priority
number and then arrival (`priority`). Running requests are served in that order, and when blocks run out
the last of them loses its own. So a victim is never better than the one it makes room for, and was never yet
served in the same step. The first running request always moves on, hence every request ends.

One step, and what must be undone when its request does not survive it:

    schedule            blocks allocated, status     -> _preempt or _finish give the blocks back
    (engine computes)
    update_from_output  tokens counted as computed, full blocks registered, token appended, stop rules

Requests may be added and aborted at any point between these calls.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Mapping
from itertools import count
from operator import attrgetter

from configs.errors import ContextLengthExceeded, InvalidRequest, SettingsError
from configs.settings import SchedulerConfig

from .kv_cache_manager import KVCacheManager
from .output import NewRequest, ScheduledRequest, SchedulerOutput
from .request import Request, RequestStatus
from .stop import stop_cause

_order = attrgetter("order")


class Scheduler:
    """Pure bookkeeping: no tensors, no clock, no threads. Times are seconds on the caller's clock."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        sliding_window: int | None = None,
    ) -> None:
        """`num_blocks` counts the reserved block 0; `max_model_len` is in tokens. `sliding_window`, in tokens,
        only when every layer has it. Raises `SettingsError` for a cache without a usable block."""
        if num_blocks < 2:
            raise SettingsError(f"the KV cache must hold at least one block of {config.block_size} tokens")
        self.config = config
        self.kv = KVCacheManager(config, num_blocks=num_blocks, sliding_window=sliding_window)
        self.max_model_len = max_model_len
        # The last token of a request needs no KV: it is never fed back.
        self.max_total_tokens = min(max_model_len, self.kv.max_tokens + 1)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # best first
        self.waiting: list[Request] = []  # best first
        self._dropped: list[str] = []  # known to the engine, no longer running
        self._arrivals = count()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_used_blocks(self) -> int:
        return self.kv.pool.num_used

    def add_request(self, request: Request) -> None:
        """Put a request into the queue.

        Raises `InvalidRequest` for an empty prompt or an id that is in use, and `ContextLengthExceeded` for a
        prompt that leaves no room for an output token, if one is wanted, in the model's context or in the whole
        KV cache. A request whose output outgrows either ends there with finish reason `length`.
        """
        if request.request_id in self.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if request.num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        num_output = int(request.wants_output)
        limit = min(self.max_model_len, self.kv.max_tokens + num_output)
        if request.num_prompt_tokens + num_output > limit:
            holder = "model's context" if limit == self.max_model_len else "KV cache"
            raise ContextLengthExceeded(
                f"the prompt has {request.num_prompt_tokens} tokens, but {'with one output token ' * num_output}"
                f"the {holder} holds at most {limit}",
                param="prompt",
            )
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        request.order = (priority, request.arrival_time, next(self._arrivals))
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_order)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End these requests, waiting or running, with finish reason `abort`; unknown ids are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan one step: running requests first, then waiting ones, within the token budget.

        While running requests are short of blocks nobody is admitted, so what a preemption frees goes to those
        it was done for.
        """
        new_requests: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        budget = self.config.max_num_batched_tokens
        budget, may_admit = self._schedule_running(scheduled, budget)
        if may_admit:
            budget = self._admit_waiting(new_requests, scheduled, budget, now)
        dropped, self._dropped = self._dropped, []
        return SchedulerOutput(
            new_requests=new_requests,
            scheduled=scheduled,
            dropped_request_ids=dropped,
            num_scheduled_tokens=self.config.max_num_batched_tokens - budget,
        )

    def update_from_output(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, int],
        failed: Mapping[str, str],
        complete: Container[str] = (),
    ) -> list[tuple[Request, list[int]]]:
        """Book what the engine computed.

        `sampled` has a token id for every row with `needs_sample`, `failed` a reason for every request that
        the engine gives up; those in `complete` end with the sampled token. Returns (request, new token
        ids) of the rows that caught up or failed, in the order of the batch; a request that ends with this step
        has its `finish_reason` set. Requests that were aborted since `schedule` are passed over.
        """
        results: list[tuple[Request, list[int]]] = []
        for row in output.scheduled:
            request = self.requests.get(row.request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            if row.request_id in failed:
                self._fail(request, failed[row.request_id])
                results.append((request, []))
                continue
            request.num_computed_tokens += row.num_scheduled_tokens
            self.kv.register_full_blocks(request)
            if request.num_behind == 0:
                new_token_ids = [sampled[row.request_id]] if row.needs_sample else []
                request.token_ids += new_token_ids
                done = row.request_id in complete
                cause = ("complete", None) if done else stop_cause(request, self.max_total_tokens)
                if cause is not None:
                    reason, request.stop_reason = cause
                    self._finish(request, reason)
                results.append((request, new_token_ids))
        return results

    def check_integrity(self) -> None:
        """Assert that queues, block tables and pool agree. O(requests + blocks)."""
        self.kv.pool.check_integrity()
        assert len(self.requests) == len(self.running) + len(self.waiting), self.requests
        references: dict[int, int] = {}
        for queue, status in ((self.running, RequestStatus.RUNNING), (self.waiting, RequestStatus.WAITING)):
            assert queue == sorted(queue, key=_order), queue
            for request in queue:
                assert self.requests[request.request_id] is request, request
                assert request.status is status, request
                assert request.num_computed_tokens <= len(request.block_ids) * self.kv.block_size, request
                assert status is RequestStatus.RUNNING or not request.block_ids, request
                for block_id in request.block_ids[request.num_released_blocks :]:
                    references[block_id] = references.get(block_id, 0) + 1
        assert len(references) == self.kv.pool.num_used, (len(references), self.kv.pool.num_used)
        for block_id, num_references in references.items():
            assert self.kv.pool.ref_count(block_id) == num_references, block_id

    def _schedule_running(self, scheduled: list[ScheduledRequest], budget: int) -> tuple[int, bool]:
        """Serve the running requests in order, preempting from the end.

        Each leaves one token of the budget to every request behind it, so that a long prompt delays nobody's
        decoding; there are never more running requests than tokens in the budget. When blocks are short the
        last request is not preempted for its own sake: it keeps its KV, and waits in place until somebody ends
        or a better one takes its blocks. Returns the budget that is left, and whether all were served.
        """
        num_running = len(self.running)
        for index in range(num_running):
            if index == len(self.running):
                break
            request = self.running[index]
            num_later = len(self.running) - index - 1
            num_tokens = min(request.num_behind, budget - num_later, self.kv.max_chunk)
            assert num_tokens > 0, request
            new_block_ids = self.kv.allocate(request, num_tokens)
            while new_block_ids is None and self.running[-1] is not request:
                self._preempt(self.running.pop())
                new_block_ids = self.kv.allocate(request, num_tokens)
            if new_block_ids is None:
                assert index > 0, request
                break
            scheduled.append(_share_of_step(request, num_tokens, new_block_ids))
            budget -= num_tokens
        return budget, len(scheduled) == num_running

    def _admit_waiting(
        self,
        new_requests: list[NewRequest],
        scheduled: list[ScheduledRequest],
        budget: int,
        now: float,
    ) -> int:
        """Admit waiting requests in order while budget, places and blocks last; returns the budget left.

        A request must fit with all its tokens, not just its first chunk, and leave one block for each
        running request to grow into: otherwise it would be preempted before it has gained anything.
        """
        while budget > 0 and self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            cached_prefix = self.kv.find_cached_prefix(request)
            if not self.kv.can_admit(request, cached_prefix, num_spare_blocks=len(self.running)):
                break
            del self.waiting[0]
            insort(self.running, request, key=_order)
            request.status = RequestStatus.RUNNING
            self.kv.adopt(request, cached_prefix)
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                request.num_cached_tokens = request.num_computed_tokens
            num_tokens = min(request.num_behind, budget, self.kv.max_chunk)
            new_block_ids = self.kv.allocate(request, num_tokens)
            assert new_block_ids is not None, request
            new_requests.append(_whole_request(request))
            scheduled.append(_share_of_step(request, num_tokens, list(request.block_ids)))
            budget -= num_tokens
        return budget

    def _preempt(self, request: Request) -> None:
        """Back to the queue with its output; its blocks may still be cached when it returns."""
        self.kv.free(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self._dropped.append(request.request_id)
        insort(self.waiting, request, key=_order)

    def _finish(self, request: Request, reason: str) -> None:
        queue = self.waiting
        if request.status is RequestStatus.RUNNING:
            queue = self.running
            self._dropped.append(request.request_id)
        index = bisect_left(queue, request.order, key=_order)
        assert queue[index] is request, request
        del queue[index]
        del self.requests[request.request_id]
        self.kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def _fail(self, request: Request, error: str) -> None:
        """End with finish reason `error`. Its KV may be what broke it, so nobody may reuse it."""
        request.error = error
        self.kv.forget(request)
        self._finish(request, "error")


def _share_of_step(request: Request, num_tokens: int, new_block_ids: list[int]) -> ScheduledRequest:
    num_computed_tokens = request.num_computed_tokens
    return ScheduledRequest(
        request_id=request.request_id,
        num_computed_tokens=num_computed_tokens,
        num_scheduled_tokens=num_tokens,
        new_block_ids=new_block_ids,
        needs_sample=num_computed_tokens + num_tokens == len(request.token_ids) and request.wants_output,
    )


def _whole_request(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
    )
