"""`python -m tests.engine.odd_core MARK FOLDER CONFIG`: a core that does what the first token of a prompt says.

0 answers with five tokens, 1 ends the process, 2 holds the interpreter's lock for seconds, 3 sleeps in its step for as
many tenths of a second as the second token says. While there is a file MARK, the core ends before it is ready, or is
ready so many seconds later as the file says.
"""

import os
import sys
import time
from pathlib import Path

import msgspec

from engine.bench.stub_core import READY
from engine.core_process import connect
from engine.messages import AbortRequests, AddRequest, CoreFailed, StepOutputs, ToCore, TokenOutput

ANSWER, DIE, HOLD, SLEEP = range(4)
HELD = 4.0
"""Seconds."""


def answer(message: AddRequest) -> TokenOutput:
    kind, *rest = message.prompt_token_ids
    if kind == DIE:
        os._exit(3)
    if kind == HOLD:
        start, count = time.process_time(), 10**7
        sum(range(count))
        sum(range(int(count * HELD / (time.process_time() - start))))
    if kind == SLEEP:
        time.sleep(rest[0] / 10)
    return TokenOutput(request_id=message.request_id, new_token_ids=[70] * 5, finish_reason="length")


def main() -> None:
    mark, folder, _ = sys.argv[1:]
    socket, heartbeat = connect(folder)
    if Path(mark).exists() and (seconds := Path(mark).read_text()):
        time.sleep(float(seconds))
    elif Path(mark).exists():
        socket.send(msgspec.msgpack.encode(CoreFailed("the mark is there")))
        sys.exit(2)
    socket.send(msgspec.msgpack.encode(READY))
    while True:
        message = msgspec.msgpack.decode(socket.recv(), type=ToCore)
        heartbeat.begin()
        if not isinstance(message, AbortRequests):
            socket.send(msgspec.msgpack.encode(StepOutputs([answer(message)])))
        heartbeat.end()


if __name__ == "__main__":
    main()
