"""A scheduler driven by an engine that computes nothing but checks every slot it reads.

The "KV" of a position is a hash of all tokens up to it, and the next token is a function of the newest one: as in
a real model, a token comes out right only if the KV of the whole prefix does. The engine keeps its own rows and
block tables from what `SchedulerOutput` says, so a wrong difference shows as well. It knows a step's tokens at once;
the scheduler learns them when the step is booked, which may be some steps later.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from configs.sampling import SamplingParams
from configs.settings import SchedulerConfig
from scheduler.output import ScheduledRequest, SchedulerOutput
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

VOCAB_SIZE = 97
EOS = 0


def kv_of(token_ids: list[int], known: list[int], salt: int) -> list[int]:
    """Extend `known`, the KV of the first tokens, to all `token_ids`."""
    for position in range(len(known), len(token_ids)):
        known.append(hash((known[-1] if known else salt, token_ids[position], position)))
    return known


def next_token(kv: int) -> int:
    return (kv >> 5) % VOCAB_SIZE


def solo(request: Request, max_total_tokens: int) -> tuple[list[int], str]:
    """(output token ids, finish reason) by definition, without a scheduler."""
    params = request.sampling_params
    token_ids = list(request.prompt_token_ids)
    output: list[int] = []
    kv: list[int] = []
    if params.max_tokens == 0:
        return [], "length"
    while True:
        kv = kv_of(token_ids, kv, salt_of(request.extra_keys))
        token_id = next_token(kv[-1])
        output.append(token_id)
        token_ids.append(token_id)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
        if token_id in stops and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(token_ids) == max_total_tokens:
            return output, "length"


def salt_of(extra_keys: tuple[str, ...]) -> int:
    return sum(ord(character) for key in extra_keys for character in key)


@dataclass
class Row:
    """What the engine knows of one request."""

    token_ids: list[int]
    salt: int
    reads_whole_prompt: bool
    num_computed_tokens: int | None = None
    block_ids: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)


class Simulation:
    """Scheduler and engine. Every step checks the limits of the step and the bookkeeping's integrity."""

    def __init__(
        self,
        *,
        num_blocks: int,
        max_model_len: int = 10_000,
        sliding_window: int | None = None,
        check: bool = True,
        most_in_flight: int = 0,
        **config: object,
    ) -> None:
        """`most_in_flight`: steps that are not booked while the next one is scheduled."""
        config.setdefault("block_size", 16)
        self.config = SchedulerConfig(**config)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.config, num_blocks=num_blocks, max_model_len=max_model_len, sliding_window=sliding_window
        )
        self.sliding_window = sliding_window
        self.check = check
        self.most_in_flight = most_in_flight
        self.in_flight: deque[tuple[SchedulerOutput, dict[str, int], dict[str, str]]] = deque()
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, str] = {}
        self.rows: dict[str, Row] = {}
        self.kv: dict[tuple[int, int], int] = {}  # (block id, offset) -> KV
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_computed_tokens = 0  # by the engine, recomputation included

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        *,
        priority: int = 0,
        extra_keys: tuple[str, ...] = (),
        eos_token_ids: tuple[int, ...] = (EOS,),
        arrival_time: float | None = None,
        deadline: float | None = None,
        **params: object,
    ) -> Request:
        params.setdefault("temperature", 0.0)
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(**params),  # type: ignore[arg-type]
            arrival_time=float(self.num_steps) if arrival_time is None else arrival_time,
            eos_token_ids=eos_token_ids,
            priority=priority,
            extra_keys=extra_keys,
            deadline=deadline,
        )
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        return request

    def abort(self, *request_ids: str) -> None:
        live = {request_id for request_id in request_ids if request_id in self.scheduler.requests}
        self.scheduler.abort_requests(request_ids)
        for request_id in live:
            self._end(self.requests[request_id])

    def step(self, failed: dict[str, str] | None = None) -> SchedulerOutput:
        """Schedule and execute a step, and book all but the newest ones; returns what was scheduled."""
        for request in self.scheduler.end_expired(float(self.num_steps)):
            self._end(request)
        output = self.scheduler.schedule(float(self.num_steps))
        self.in_flight.append((output, self.execute(output), failed or {}))
        while len(self.in_flight) > (self.most_in_flight if output.scheduled else 0):
            self.book(*self.in_flight.popleft())
        return output

    def book(self, output: SchedulerOutput, sampled: dict[str, int], failed: dict[str, str] | None = None) -> None:
        results = self.scheduler.update_from_output(output, sampled, failed or {})
        for request, _ in results:
            if request.is_finished:
                self._end(request)
        self.num_steps += 1
        if self.check:
            self.scheduler.check_integrity()

    def drain(self, max_steps: int = 20_000) -> None:
        """Run until all requests have ended, then check that nothing is left behind."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                break
            before, num_in_flight = self.num_computed_tokens + len(self.ended), len(self.in_flight)
            self.step()
            assert self.num_computed_tokens + len(self.ended) > before or num_in_flight, "a step without progress"
        assert not self.scheduler.has_work, self.scheduler.requests
        assert set(self.ended) == set(self.requests)
        assert self.scheduler.num_used_blocks == 0
        self.scheduler.check_integrity()

    def check_outputs(self) -> None:
        """Everyone who was not aborted got what it gets alone."""
        for request_id, reason in self.ended.items():
            request = self.requests[request_id]
            expected, expected_reason = solo(request, self.scheduler.max_total_tokens)
            if reason in ("abort", "error", "timeout"):
                assert request.output_token_ids == expected[: request.num_output_tokens], request
            else:
                assert (request.output_token_ids, reason) == (expected, expected_reason), request

    def execute(self, output: SchedulerOutput) -> dict[str, int]:
        """Write the KV of all the step's tokens, then read all that these attend to, as backends do layer by layer."""
        self._update_rows(output)
        for scheduled in output.scheduled:
            row, start = self.rows[scheduled.request_id], scheduled.num_computed_tokens
            for position in range(start, start + scheduled.num_scheduled_tokens):
                assert row.block_ids[position // self.config.block_size] != 0
                self.kv[self._slot(row, position)] = row.kv[position]
        sampled: dict[str, int] = {}
        for scheduled in output.scheduled:
            row = self.rows[scheduled.request_id]
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            self._read(scheduled, end)
            request = self.requests[scheduled.request_id]
            wants_output = request.sampling_params.max_tokens != 0
            assert scheduled.needs_sample == (end == len(row.token_ids) and wants_output)
            assert end <= request.num_tokens or not request.needs_newest_token
            if scheduled.needs_sample:
                sampled[scheduled.request_id] = next_token(row.kv[end - 1])
                row.token_ids.append(sampled[scheduled.request_id])
        return sampled

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_ids[position // self.config.block_size], position % self.config.block_size

    def _read(self, scheduled: ScheduledRequest, end: int) -> None:
        """Check the KV that the step's tokens see, up to position `end`."""
        row, start = self.rows[scheduled.request_id], 0
        if self.sliding_window is not None:
            start = max(0, scheduled.num_computed_tokens - self.sliding_window + 1)
        for position in range(start, end):
            assert self.kv[self._slot(row, position)] == row.kv[position], (scheduled, position)

    def _update_rows(self, output: SchedulerOutput) -> None:
        self._check_limits(output)
        for request_id in output.dropped_request_ids:
            del self.rows[request_id]
        for new in output.new_requests:
            assert new.request_id not in self.rows
            request = self.scheduler.requests[new.request_id]
            assert new.token_ids == request.token_ids
            assert new.num_prompt_tokens == request.num_prompt_tokens
            params = new.sampling_params
            reads = params.prompt_logprobs is not None or params.pooling == "mean"
            reads_whole_prompt = reads and len(new.token_ids) == new.num_prompt_tokens
            self.rows[new.request_id] = Row(list(new.token_ids), salt_of(request.extra_keys), reads_whole_prompt)
        for scheduled in output.scheduled:
            row = self.rows[scheduled.request_id]
            assert row.num_computed_tokens in (None, scheduled.num_computed_tokens)
            if row.num_computed_tokens is None and row.reads_whole_prompt:
                assert scheduled.num_computed_tokens == 0
            row.num_computed_tokens = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            row.block_ids += scheduled.new_block_ids
            kv_of(row.token_ids, row.kv, row.salt)
            self.num_computed_tokens += scheduled.num_scheduled_tokens

    def _check_limits(self, output: SchedulerOutput) -> None:
        num_tokens = [scheduled.num_scheduled_tokens for scheduled in output.scheduled]
        assert min(num_tokens, default=1) > 0
        assert sum(num_tokens) == output.num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        names = [scheduled.request_id for scheduled in output.scheduled]
        assert len(names) == len(set(names)) <= self.scheduler.num_running <= self.config.max_num_seqs
        requests = self.scheduler.requests
        victims = [
            requests[name]
            for name in output.dropped_request_ids
            if name in requests and requests[name].status is RequestStatus.WAITING
        ]
        if victims:
            self.num_preemptions += len(victims)
            assert not output.new_requests
            best = min(victim.order for victim in victims)
            assert all(requests[name].order < best for name in names)

    def _end(self, request: Request) -> None:
        assert request.is_finished
        assert request.finish_reason is not None
        assert request.request_id not in self.ended
        self.ended[request.request_id] = request.finish_reason
