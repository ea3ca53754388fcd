"""What may be costly is compiled in a process that can be killed first: `python -m engine.structured.trial FD CONFIG`.

    core ── a socket for each grammar ──> template process ── fork ──> child: limits itself, compiles, answers, ends

The template has everything loaded, so a child costs milliseconds; what it takes is given back when it ends. A child
that reaches its limit is killed by the kernel, whatever it is at, and nobody else notices.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from configs.errors import CompilerBusy, InvalidRequest
from configs.sampling import StructuredOutput
from configs.settings import EngineConfig
from engine.machine import core_variables, module_environment

MAX_COMPILE_TIME = 10.0
"""Seconds."""
MAX_MEMORY = 512 << 20
"""Bytes that a child may take beyond what the template has."""
FAIR_TIME = 2.0
"""Seconds that a grammar has though others wait."""
_POLL = 0.05
_NICENESS = 5


class Trial(msgspec.Struct):
    """How a compilation went."""

    num_bytes: int = 0
    error: str | None = None
    """Why there is no language."""


class TrialProcess:
    """Starts the template at the first use, and again when it has ended. Its methods may be called by any thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._settings = msgspec.json.encode(config).decode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def compile(self, structured: StructuredOutput, others_wait: Callable[[], bool]) -> Trial:
        """Raises InvalidRequest for what takes too much, and CompilerBusy for what takes long while others wait."""
        job = self._send(structured)
        with job:
            pid = int.from_bytes(_read(job, 4))
            answer, start = b"", time.monotonic()
            job.settimeout(_POLL)
            while pid:
                with contextlib.suppress(TimeoutError):
                    if not (part := job.recv(1 << 16)):
                        break
                    answer += part
                if time.monotonic() - start > FAIR_TIME and others_wait():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    raise CompilerBusy("others wait for the compiler, and this takes long; try again later")
        if answer:
            return msgspec.json.decode(answer, type=Trial)
        if not pid:
            with self._lock:
                self.close()
            raise CompilerBusy("the compiler of grammars has ended; try again")
        limit = f"{MAX_COMPILE_TIME:.0f} seconds"
        if time.monotonic() - start < 0.9 * MAX_COMPILE_TIME:
            limit = f"{MAX_MEMORY >> 20} MB of memory"
        raise InvalidRequest(f"it takes more than {limit} to compile", param="structured")

    def _send(self, structured: StructuredOutput) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            for is_last in (False, True):
                with self._lock:
                    control = self._started()
                    try:
                        socket.send_fds(control, [b"."], [theirs.fileno()])
                        break
                    except OSError:
                        self.close()
                        if is_last:
                            raise
        ours.sendall(msgspec.json.encode(structured))
        ours.shutdown(socket.SHUT_WR)
        return ours

    def start(self) -> None:
        """Does not wait until it is ready."""
        with self._lock:
            self._started()

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", "engine.structured.trial", str(theirs.fileno()), self._settings),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=module_environment(core_variables(1)),
            )
        return self._control

    def close(self) -> None:
        """End the template; the next use starts another one."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _read(job: socket.socket, size: int) -> bytes:
    """As many bytes, or none where there are no more."""
    with contextlib.suppress(ConnectionError):
        return job.recv(size, socket.MSG_WAITALL)
    return b""


def main() -> None:
    """The template. Ends when the core's end of the control socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the core decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children
    control = socket.socket(fileno=int(sys.argv[1]))
    from .compiler import load_compiler

    compiler = load_compiler(msgspec.json.decode(sys.argv[2], type=EngineConfig))
    compiler.compile(StructuredOutput("json_object"))  # most languages have parts of it
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as job:
            if os.fork() == 0:
                try:
                    control.close()
                    _answer(job, compiler.compile)
                finally:
                    os._exit(0)


def _answer(job: socket.socket, compile_: Callable[[StructuredOutput], object]) -> None:
    structured = msgspec.json.decode(b"".join(iter(lambda: job.recv(1 << 16), b"")), type=StructuredOutput)
    job.sendall(os.getpid().to_bytes(4))
    limit = MAX_MEMORY + _virtual_bytes()
    with contextlib.suppress(OSError, ValueError):  # where the system has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.nice(_NICENESS)
    signal.setitimer(signal.ITIMER_REAL, MAX_COMPILE_TIME)  # its signal ends the process
    try:
        trial = Trial(getattr(compile_(structured), "num_bytes", 0))
    except ValueError as error:
        if "bad_alloc" in str(error):
            return
        trial = Trial(error=str(error))
    job.sendall(msgspec.json.encode(trial))


def _virtual_bytes() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 8 << 30


if __name__ == "__main__":
    main()
