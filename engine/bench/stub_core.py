"""`python -m engine.bench.stub_core STEP_MS FOLDER CONFIG`: a core without a model, to measure what is around it.

Each request gets its own prompt's tokens, over and over; every step gives each running request one. Steps begin
every STEP_MS milliseconds, or as fast as they can be sent when it is 0.
"""

import sys
import time

import msgspec

from engine.core_process import connect
from engine.messages import (
    NO_STATS,
    AddRequest,
    CoreReady,
    FromCore,
    GetSnapshot,
    Snapshot,
    StepOutputs,
    ToCore,
    TokenOutput,
)

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
    """The running requests and how many tokens each has got."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[AddRequest, int]] = {}

    def take(self, message: ToCore) -> FromCore | None:
        """Returns the answer, where there is one at once."""
        if isinstance(message, AddRequest):
            self._running[message.request_id] = (message, 0)
            return None
        if isinstance(message, GetSnapshot):
            return Snapshot(NO_STATS, [], bytes(1))
        for request_id in message.request_ids:
            self._running.pop(request_id, None)
        return StepOutputs([TokenOutput(request_id=name, finish_reason="abort") for name in message.request_ids])

    def step(self) -> list[TokenOutput]:
        outputs = []
        for request_id, (request, count) in list(self._running.items()):
            ids, limit = request.prompt_token_ids, request.sampling_params.max_tokens
            ended = limit is not None and count + 1 >= limit
            reason = "length" if ended else None
            new_token_ids = [] if limit == 0 else [ids[count % len(ids)]]
            outputs.append(TokenOutput(request_id=request_id, new_token_ids=new_token_ids, finish_reason=reason))
            if ended:
                del self._running[request_id]
            else:
                self._running[request_id] = (request, count + 1)
        return outputs


def main() -> None:
    step_ms, folder, _ = sys.argv[1:]
    socket, _heartbeat = connect(folder)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToCore)
    socket.send(encoder.encode(READY))
    core, due = StubCore(), 0.0
    while True:
        if socket.poll(int(max(0.0, due - time.monotonic()) * 1e3)):
            if answer := core.take(decoder.decode(socket.recv())):
                socket.send(encoder.encode(answer))
        elif time.monotonic() >= due:
            due = time.monotonic() + float(step_ms) / 1e3
            if outputs := core.step():
                socket.send(encoder.encode(StepOutputs(outputs)))


if __name__ == "__main__":
    main()
