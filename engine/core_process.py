"""The core as a process: `python -m engine.core_process FOLDER CONFIG`, started by `CoreClient`.

One loop owns the device: take what has arrived, step, send what came out. When there is nothing to do it blocks.
FOLDER holds the socket and the page of the heartbeat, whose thread also ends the process when the parent is gone.
"""

import errno
import gc
import logging
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from configs.errors import UsageError
from configs.settings import EngineConfig

from .heartbeat import PAGE, SOCKET, Heartbeat
from .log_lines import configure
from .messages import AbortRequests, CoreFailed, FromCore, GetSnapshot, StepOutputs, ToCore, TokenOutput

if TYPE_CHECKING:
    from .core import EngineCore

logger = logging.getLogger("octavo.engine")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToCore)


def main() -> int:
    """Returns when the start has failed: 1 for an error of ours, 2 for one that the person who starts can mend."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the parent decides
        signal.signal(number, lambda *_: None)  # what is started from here does not inherit this
    folder, settings = sys.argv[1:]
    config = msgspec.json.decode(settings, type=EngineConfig)
    configure(config.log_level, config.log_format, "engine")
    socket, heartbeat = connect(folder)
    try:
        core = _load(config, socket)
    except UsageError as error:
        _send(socket, CoreFailed(str(error)))
        return 2
    except Exception as error:
        if lack := _lack(error):
            _send(socket, CoreFailed(lack))
            return 2
        logger.exception("the engine cannot start")
        _send(socket, CoreFailed(f"the engine cannot start: {type(error).__name__}: {error}"))
        return 1
    return _serve(core, socket, heartbeat)


def connect(folder: str) -> tuple[zmq.Socket[bytes], Heartbeat]:
    """The core's ends. The socket drops nothing, however far behind the other end is; the heart beats."""
    heartbeat = Heartbeat(f"{folder}/{PAGE}")
    heartbeat.start()
    socket = zmq.Context().socket(zmq.PAIR)
    socket.hwm = 0
    socket.linger = 1000  # ms
    socket.connect(f"ipc://{folder}/{SOCKET}")
    return socket, heartbeat


def _lack(error: Exception) -> str | None:
    """What the machine has too little of, and the mend, where that is why the start failed."""
    number = error.errno if isinstance(error, OSError) else None
    is_torch = any(words in str(error) for words in ("can't allocate memory", "out of memory"))  # its plain errors
    if is_torch or isinstance(error, MemoryError) or number == errno.ENOMEM:
        return "out of memory while loading; take a smaller model, quantization int8 or int4, or fewer kv_cache_tokens"
    if isinstance(error, OSError) and number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return f"cannot write {error.filename}: {error.strerror}; TMPDIR and XDG_CACHE_HOME may name other places"
    return None


def _load(config: EngineConfig, socket: zmq.Socket[bytes]) -> "EngineCore":
    start = time.perf_counter()
    from .start import start_core  # brings torch, whose import is part of the start-up time

    imported = time.perf_counter() - start
    core = start_core(config)
    gc.collect()
    gc.freeze()  # what was loaded stays: collections need not walk it
    _send(socket, msgspec.structs.replace(core.ready, timings={"imports": imported, **core.ready.timings}))
    return core


def _serve(core: "EngineCore", socket: zmq.Socket[bytes], heartbeat: Heartbeat) -> NoReturn:
    """An exception of a step ends the process."""
    told = core.stats().counts
    while True:
        has_mail = socket.poll(0 if core.has_work else None)
        heartbeat.begin()
        outputs = _take_messages(core, socket) if has_mail else []
        if core.has_work:
            outputs += core.step()
        stats = core.stats()
        if outputs or stats.counts != told:  # others can tell from the last message how the core is
            _send(socket, StepOutputs(outputs, stats))
            told = stats.counts
        heartbeat.end()


def _take_messages(core: "EngineCore", socket: zmq.Socket[bytes]) -> list[TokenOutput]:
    """All that has arrived; returns the outputs of requests that are refused or aborted."""
    outputs = []
    while socket.poll(0):
        message = _decoder.decode(socket.recv())
        if isinstance(message, AbortRequests):
            core.abort_requests(message.request_ids)
            outputs += [TokenOutput(request_id=name, finish_reason="abort") for name in message.request_ids]
        elif isinstance(message, GetSnapshot):
            _send(socket, core.snapshot())
        elif refusal := core.add_request(message):
            outputs.append(refusal)
    return outputs


def _send(socket: zmq.Socket[bytes], message: FromCore) -> None:
    socket.send(_encoder.encode(message))


if __name__ == "__main__":
    sys.exit(main())
