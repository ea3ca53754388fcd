"""`python -m engine.bench.stub_core STEP_MS FOLDER CONFIG`: a core without a model, to measure what is around it.

Each request gets its own prompt's tokens, over and over; every step gives each running request one. Steps begin
every STEP_MS milliseconds, or as fast as they can be sent when it is 0.
"""

import sys
import time
from collections.abc import Iterable

import msgspec

from engine.core_process import connect
from engine.messages import (
    AbortRequests,
    AddRequest,
    CoreReady,
    FromCore,
    Snapshot,
    StepOutputs,
    StepStats,
    ToCore,
    TokenOutput,
)
from scheduler.request import Request
from scheduler.stop import stop_cause
from scheduler.timeline import Chunk, Counters

READY = CoreReady(
    architecture="stub",
    num_parameters=0,
    dtype="none",
    kv_cache_dtype="none",
    quantization="none",
    device="none",
    attention_backend="none",
    notes=[],
    vocab_size=2**31,
    max_model_len=2**31,
    kv_cache_tokens=2**31,
    block_size=16,
    num_threads=0,
    timings={},
)


class StubCore:
    """The core's side of the messages. Every request is admitted at once and is said to hold one block."""

    def __init__(self, ready: CoreReady = READY, step_seconds: float = 0.0) -> None:
        """The statistics say that each step took `step_seconds`."""
        self.ready = ready
        self.requests: dict[str, Request] = {}
        """Those that run, by their ids."""
        self.counters = Counters()
        self.num_waiting = 0
        self.wait_cause: str | None = None
        self._step_seconds = step_seconds
        self._last_step = (0.0, 0)  # when it was, and its tokens

    def take(self, message: ToCore) -> FromCore | None:
        """Returns the answer, where there is one at once."""
        if isinstance(message, AddRequest):
            self._add(message)
            return None
        if isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self.requests.pop(request_id, None)
            return StepOutputs([TokenOutput(request_id=name, finish_reason="abort") for name in message.request_ids])
        return Snapshot(self.stats(), [], bytes(1))

    def step(self, request_ids: Iterable[str] | None = None) -> StepOutputs:
        """A token for every running request, or for those that are named."""
        now = time.monotonic()
        names = list(self.requests) if request_ids is None else [name for name in request_ids if name in self.requests]
        self.counters.num_steps += 1
        self.counters.num_step_requests += len(names)
        self.counters.num_step_tokens += len(names)
        self._last_step = (now, len(names))
        outputs = [self._output(self.requests[name], now) for name in names]
        for output in outputs:
            if output.finish_reason is not None:
                del self.requests[output.request_id]
        return StepOutputs(outputs, self.stats())

    def stats(self) -> StepStats:
        time_of_step, num_tokens = self._last_step
        return StepStats(
            time=time_of_step,
            num_running=len(self.requests),
            num_waiting=self.num_waiting,
            num_used_blocks=len(self.requests),
            step_seconds=self._step_seconds,
            step_tokens=num_tokens,
            wait_cause=self.wait_cause,
            counters=self.counters,
        )

    def next_token(self, request: Request) -> int:
        return request.token_ids[request.num_output_tokens % request.num_prompt_tokens]

    def output(self, request: Request, now: float) -> TokenOutput:
        """The request's next token and, where it is the last one, why."""
        if request.deadline is not None and now >= request.deadline:
            return TokenOutput(request_id=request.request_id, finish_reason="timeout")
        if not request.wants_output:
            return TokenOutput(request_id=request.request_id, finish_reason="length")
        request.token_ids.append(self.next_token(request))
        reason, stop_id = stop_cause(request, self.ready.max_model_len) or (None, None)
        new = request.token_ids[-1:]
        return TokenOutput(request_id=request.request_id, new_token_ids=new, finish_reason=reason, stop_reason=stop_id)

    def _add(self, message: AddRequest) -> None:
        now, size = time.monotonic(), len(message.prompt_token_ids)
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            message.sampling_params,
            arrival_time=now,
            eos_token_ids=message.eos_token_ids,
            deadline=message.deadline,
        )
        request.timeline.admitted = now
        request.timeline.add_chunk(Chunk(now, size, size, 1))
        self.counters.num_prefix_queries += size
        self.requests[message.request_id] = request

    def _output(self, request: Request, now: float) -> TokenOutput:
        """The next output, with the timeline where `TokenOutput` has it."""
        output, timeline = self.output(request, now), request.timeline
        if is_first := timeline.first_token is None:
            timeline.note_first_token(now, self.counters)
        if output.finish_reason is not None:
            timeline.note_end(now, self.counters)
        elif not is_first:
            return output
        return msgspec.structs.replace(output, timeline=timeline)


def main() -> None:
    step_ms, folder, _ = sys.argv[1:]
    socket, _heartbeat = connect(folder)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToCore)
    core, due = StubCore(step_seconds=float(step_ms) / 1e3), 0.0
    socket.send(encoder.encode(core.ready))
    while True:
        if socket.poll(int(max(0.0, due - time.monotonic()) * 1e3)):
            if answer := core.take(decoder.decode(socket.recv())):
                socket.send(encoder.encode(answer))
        elif time.monotonic() >= due:
            due = time.monotonic() + float(step_ms) / 1e3
            if core.requests:
                socket.send(encoder.encode(core.step()))


if __name__ == "__main__":
    main()
