"""The core as a process: `python -m engine.core_process ENDPOINT CONFIG`, started by `CoreClient`.

One loop owns the device: take what has arrived, step, send what came out. When there is nothing to do it blocks.
Standard input is a pipe from the parent: its end means that the parent is gone, and the core ends too.
"""

import gc
import logging
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING

import msgspec
import zmq

from configs.errors import UsageError
from configs.settings import EngineConfig

from .messages import AddRequest, CoreFailed, FromCore, StepOutputs, ToCore, TokenOutput

if TYPE_CHECKING:
    from .core import EngineCore

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToCore)


def main() -> int:
    """Exit status: 0 when told to end, 1 for an error of ours, 2 for one that the person who starts can mend."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    endpoint, config = sys.argv[1:]
    socket = connect(endpoint)
    try:
        core = _load(msgspec.json.decode(config, type=EngineConfig), socket)
    except UsageError as error:
        _send(socket, CoreFailed(str(error)))
        return 2
    except Exception as error:
        traceback.print_exc()
        _send(socket, CoreFailed(f"the engine cannot start: {type(error).__name__}: {error}"))
        return 1
    _serve(core, socket)
    return 0


def connect(endpoint: str) -> zmq.Socket[bytes]:
    """The core's end of the socket: nothing is dropped, however far behind the other end is."""
    socket = zmq.Context().socket(zmq.PAIR)
    socket.hwm = 0
    socket.linger = 1000  # ms
    socket.connect(endpoint)
    return socket


def _load(config: EngineConfig, socket: zmq.Socket[bytes]) -> "EngineCore":
    start = time.perf_counter()
    from .core import EngineCore  # brings torch, whose import is part of the start-up time

    imported = time.perf_counter() - start
    core = EngineCore(config)
    gc.collect()
    gc.freeze()  # what was loaded stays: collections need not walk it
    _send(socket, msgspec.structs.replace(core.ready, timings={"imports": imported, **core.ready.timings}))
    return core


def _serve(core: "EngineCore", socket: zmq.Socket[bytes]) -> None:
    """Until the parent is gone. An exception of a step ends the process."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    # A signal that comes just before the wait would be noticed only after it: this makes the wait end.
    signalled, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    poller.register(signalled, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(0 if core.has_work else None))
        if sys.stdin.fileno() in ready:
            return
        outputs = _take_messages(core, socket) if ready else []
        if core.has_work:
            outputs += core.step()
        if outputs:
            _send(socket, StepOutputs(outputs))


def _take_messages(core: "EngineCore", socket: zmq.Socket[bytes]) -> list[TokenOutput]:
    """All that has arrived; returns the outputs of refused requests."""
    refusals = []
    while socket.poll(0):
        message = _decoder.decode(socket.recv())
        if not isinstance(message, AddRequest):
            core.abort_requests(message.request_ids)
        elif refusal := core.add_request(message):
            refusals.append(refusal)
    return refusals


def _send(socket: zmq.Socket[bytes], message: FromCore) -> None:
    socket.send(_encoder.encode(message))


if __name__ == "__main__":
    sys.exit(main())
