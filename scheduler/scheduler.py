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

    schedule            blocks allocated and, when full, registered; tokens counted as computed, status
                        -> _preempt or _finish give the blocks back, _fail takes them out of the cache too
    (engine computes)
    update_from_output  blocks that became known registered, token appended, stop rules

Requests may be added and aborted at any point between these calls. Steps may also be scheduled before the one under
way is booked: its tokens then count as pending, and what an ended or preempted request still has under way is passed
over when it is booked. This is sound where the engine runs steps in order: a block that is given back and allocated
again is written by the later step after the earlier one.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Mapping
from itertools import count
from operator import attrgetter

from configs.errors import ContextLengthExceeded, InvalidRequest, SettingsError
from configs.settings import DEFAULT_BATCHED_TOKENS, SchedulerConfig

from .kv_cache_manager import KVCacheManager
from .output import NewRequest, ScheduledRequest, SchedulerOutput
from .request import Request, RequestStatus
from .stop import stop_cause
from .timeline import Chunk, Counters

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
            raise SettingsError("the KV cache must hold at least one block")
        self.config = config
        self.max_num_batched_tokens = config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS
        self.kv = KVCacheManager(config, num_blocks=num_blocks, sliding_window=sliding_window)
        self.max_model_len = max_model_len
        # The last token of a request needs no KV: it is never fed back.
        self.max_total_tokens = min(max_model_len, self.kv.max_tokens + 1)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # best first
        self.waiting: list[Request] = []  # best first
        self._deadlines: list[tuple[float, str]] = []  # of those that have one, with their ids, earliest first
        self._dropped: list[str] = []  # known to the engine, no longer running
        self.counters = Counters()
        self.wait_cause: str | None = None
        """Why somebody waits since the last `schedule`: blocks, seats, tokens of a step; None when nobody does."""
        self._arrivals = count()
        self._admissions = count()

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
        if request.deadline is not None:
            insort(self._deadlines, (request.deadline, request.request_id))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End these requests, waiting or running, with finish reason `abort`; unknown ids are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")

    def end_expired(self, now: float) -> list[Request]:
        """End the requests whose deadline has come, waiting or running, with finish reason `timeout`; returns them."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.requests[self._deadlines[0][1]]
            self._finish(request, "timeout")
            expired.append(request)
        return expired

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan one step: running requests first, then waiting ones, within the token budget.

        While running requests are short of blocks nobody is admitted, so what a preemption frees goes to those
        it was done for.
        """
        new_requests: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        budget = self.max_num_batched_tokens
        budget, may_admit = self._schedule_running(scheduled, budget)
        self.wait_cause = None if may_admit or not self.waiting else "blocks"
        if may_admit:
            budget = self._admit_waiting(new_requests, scheduled, budget, now)
        self._count(scheduled, self.max_num_batched_tokens - budget, now)
        dropped, self._dropped = self._dropped, []
        return SchedulerOutput(
            new_requests=new_requests,
            scheduled=scheduled,
            dropped_request_ids=dropped,
            num_scheduled_tokens=self.max_num_batched_tokens - budget,
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
        has its `finish_reason` set. Outputs are booked in the order in which they were scheduled; requests that
        ended or lost their place since `schedule` are passed over.
        """
        results: list[tuple[Request, list[int]]] = []
        for row in output.scheduled:
            request = self.requests.get(row.request_id)
            if request is None or request.admission != row.admission:
                continue
            if row.request_id in failed:
                self._fail(request, failed[row.request_id])
                results.append((request, []))
                continue
            num_computed = row.num_computed_tokens + row.num_scheduled_tokens
            self.kv.register_full_blocks(request, num_computed)
            if num_computed == request.num_tokens:
                new_token_ids = [sampled[row.request_id]] if row.needs_sample else []
                request.token_ids += new_token_ids
                request.num_pending_tokens -= len(new_token_ids)
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
        timed = [(one.deadline, name) for name, one in self.requests.items() if one.deadline is not None]
        assert self._deadlines == sorted(timed), self._deadlines
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
            if self._waits_for_steps(request):
                continue
            num_later = len(self.running) - index - 1
            num_tokens = min(request.num_behind, budget - num_later, self.kv.max_chunk)
            assert num_tokens > 0, request
            new_block_ids = self.kv.allocate(request, num_tokens)
            while new_block_ids is None and self.running[-1] is not request:
                self._preempt(self.running.pop())
                new_block_ids = self.kv.allocate(request, num_tokens)
            if new_block_ids is None:
                assert index > 0, request
                return budget, False
            scheduled.append(self._share_of_step(request, num_tokens, new_block_ids))
            budget -= num_tokens
        return budget, len(self.running) == num_running

    def _waits_for_steps(self, request: Request) -> bool:
        """Whether only the steps under way can move it on: they end it, or its next token depends on theirs."""
        if request.num_pending_tokens == 0:
            return request.num_behind == 0
        num_tokens, params = request.num_tokens + request.num_pending_tokens, request.sampling_params
        is_last = num_tokens - request.num_prompt_tokens == params.max_tokens or num_tokens >= self.max_total_tokens
        return is_last or request.needs_newest_token

    def _admit_waiting(
        self,
        new_requests: list[NewRequest],
        scheduled: list[ScheduledRequest],
        budget: int,
        now: float,
    ) -> int:
        """Admit waiting requests in order while budget, places and blocks last; returns the budget left.

        A request must fit with all its tokens, not just its first chunk, and leave one block for each
        running request to grow into: otherwise it would be preempted before it has gained anything. There are
        never more running requests than tokens in the budget, also while some of them wait for the steps under way.
        """
        while self.waiting:
            has_seat = len(self.running) < self.config.max_num_seqs
            if budget == 0 or not has_seat or len(self.running) == self.max_num_batched_tokens:
                self.wait_cause = "tokens" if has_seat or budget == 0 else "seats"
                break
            request = self.waiting[0]
            cached_prefix = self.kv.find_cached_prefix(request)
            if not self.kv.can_admit(request, cached_prefix, num_spare_blocks=len(self.running)):
                self.wait_cause = "blocks"
                break
            del self.waiting[0]
            insort(self.running, request, key=_order)
            request.status, request.admission = RequestStatus.RUNNING, next(self._admissions)
            self.kv.adopt(request, cached_prefix)
            if request.timeline.admitted is None:
                self.counters.num_prefix_queries += request.num_tokens
                self.counters.num_prefix_hits += request.num_computed_tokens
                request.timeline.admitted = now
                request.num_cached_tokens = request.num_computed_tokens
            num_tokens = min(request.num_behind, budget, self.kv.max_chunk)
            new_block_ids = self.kv.allocate(request, num_tokens)
            assert new_block_ids is not None, request
            new_requests.append(_whole_request(request))
            scheduled.append(self._share_of_step(request, num_tokens, list(request.block_ids)))
            budget -= num_tokens
        return budget

    def _share_of_step(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> ScheduledRequest:
        """The next `num_tokens` of the request, which count as computed from now on."""
        num_computed_tokens = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        if num_computed_tokens < request.num_ever_computed_tokens:
            again = min(num_tokens, request.num_ever_computed_tokens - num_computed_tokens)
            request.timeline.num_recomputed_tokens += again
            self.counters.num_recomputed_tokens += again
        request.num_ever_computed_tokens = max(request.num_ever_computed_tokens, request.num_computed_tokens)
        needs_sample = request.num_behind == 0 and request.wants_output
        request.num_pending_tokens += needs_sample
        return ScheduledRequest(
            request_id=request.request_id,
            admission=request.admission,
            num_computed_tokens=num_computed_tokens,
            num_scheduled_tokens=num_tokens,
            new_block_ids=new_block_ids,
            needs_sample=needs_sample,
        )

    def _count(self, scheduled: list[ScheduledRequest], num_tokens: int, now: float) -> None:
        if not scheduled:
            return
        self.counters.num_steps += 1
        self.counters.num_step_requests += len(scheduled)
        self.counters.num_step_tokens += num_tokens
        if num_tokens > len(scheduled):
            for share in scheduled:
                if share.num_scheduled_tokens > 1:
                    chunk = Chunk(now, share.num_scheduled_tokens, num_tokens, len(scheduled))
                    self.requests[share.request_id].timeline.add_chunk(chunk)

    def _preempt(self, request: Request) -> None:
        """Back to the queue with its output; its blocks may still be cached when it returns. Pending tokens are
        computed again."""
        self._leave(request, RequestStatus.WAITING)
        request.timeline.num_preemptions += 1
        request.timeline.is_told = False
        self.counters.num_preemptions += 1
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
        if request.deadline is not None:
            del self._deadlines[bisect_left(self._deadlines, (request.deadline, request.request_id))]
        self._leave(request, RequestStatus.FINISHED)
        request.finish_reason = reason

    def _leave(self, request: Request, status: RequestStatus) -> None:
        self.kv.free(request)
        request.num_pending_tokens = 0
        request.status, request.admission = status, -1

    def _fail(self, request: Request, error: str) -> None:
        """End with finish reason `error`. Its KV may be what broke it, so nobody may reuse it."""
        request.error = error
        self.kv.forget(request)
        self._finish(request, "error")


def _whole_request(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
        admission=request.admission,
    )
