"""`CoreClient`: starts the core process and carries messages to and from it. Imports no torch."""

import asyncio
import contextlib
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from configs.errors import UsageError
from configs.settings import EngineConfig

from .heartbeat import PAGE, SOCKET, Monitor, Pulse
from .machine import core_variables, module_environment, usable_cores
from .messages import (
    CoreFailed,
    CoreReady,
    FromCore,
    GetSnapshot,
    Snapshot,
    StepOutputs,
    StepStats,
    ToCore,
    TokenOutput,
)

_READABLE = int(zmq.POLLIN)
_MESSAGES_AT_ONCE = 16
"""Steps that are merged at most before readers get their turn."""
CORE = ("engine.core_process",)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromCore)


class CoreClient:
    """One core process and the only socket to it, in a folder that only this user can enter."""

    def __init__(self, process: Process, socket: zmq.Socket[bytes], monitor: Monitor, folder: str) -> None:
        self._process = process
        self._socket = socket
        self._monitor = monitor
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[CoreReady | CoreFailed] = self._loop.create_future()
        self.on_outputs: Callable[[list[TokenOutput]], None] = lambda outputs: None
        """Called with the outputs of each step that has any."""
        self.stats: StepStats | None = None
        """The newest; those of a step are here before its outputs are told."""
        self._snapshots: deque[asyncio.Future[Snapshot]] = deque()
        self._loop.add_reader(socket.FD, self._receive)
        self._receive()

    @classmethod
    async def start(cls, config: EngineConfig, core: Sequence[str] = CORE) -> "CoreClient":
        """Start the process, a module and its first arguments; `wait_ready` waits until it has loaded."""
        try:
            return await cls._start(config, core)
        except (OSError, zmq.ZMQError) as error:
            raise UsageError(f"cannot start the engine process: {_reason(error)}") from error

    @classmethod
    async def _start(cls, config: EngineConfig, core: Sequence[str]) -> "CoreClient":
        with contextlib.ExitStack() as on_failure:
            folder = tempfile.mkdtemp(prefix="octavo-")
            on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
            monitor = Monitor(f"{folder}/{PAGE}")
            socket = zmq.Context().socket(zmq.PAIR)
            on_failure.callback(socket.context.destroy, linger=0)
            socket.hwm = 0
            socket.linger = 0
            socket.bind(f"ipc://{folder}/{SOCKET}")
            # -P: a folder named engine/ where the server was started must not be taken for ours
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", *core, folder, msgspec.json.encode(_own_settings(config)).decode()),
                stdin=PIPE,
                stdout=DEVNULL,
                env=module_environment(core_variables(config.num_threads or usable_cores())),
            )
            on_failure.pop_all()
        return cls(process, socket, monitor, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> CoreReady:
        """What the core has loaded. Raises `UsageError` with its one line when it has given up."""
        end = asyncio.ensure_future(self.wait_end())
        either: set[asyncio.Future[Any]] = {self._answer, end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._answer.done():  # the last words may still be under way
                await asyncio.wait({self._answer}, timeout=0.2)
            if not self._answer.done():
                hint = "the system may be out of memory" if end.result() == "signal 9" else "see the log"
                raise UsageError(f"the engine process ended while it started, with {end.result()}; {hint}")
            answer = self._answer.result()
        finally:
            end.cancel()
        if isinstance(answer, CoreFailed):
            raise UsageError(answer.message)
        shutil.rmtree(self._folder)  # both ends are connected
        return answer

    def send(self, message: ToCore) -> None:
        """Hand `message` to the socket's queue; a core that has ended never gets it."""
        with contextlib.suppress(zmq.Again):  # it has ended just now: the socket would wait for another one to connect
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        self._loop.call_soon(self._receive)  # sending may have used up the notice of what has come in meanwhile

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """How the core is between two steps, unless `fail_snapshots` comes before."""
        self._snapshots.append(self._loop.create_future())
        self.send(GetSnapshot())
        return self._snapshots[-1]

    def fail_snapshots(self, error: Exception) -> None:
        """Those that were asked for will not come."""
        while self._snapshots:
            if not (snapshot := self._snapshots.popleft()).done():
                snapshot.set_exception(error)

    async def wait_end(self) -> str:
        """Wait for the end of the process; says how it ended."""
        return _describe(await self._process.wait())

    def pulse(self) -> Pulse:
        return self._monitor.look(self.pid)

    def kill(self) -> None:
        """End the process, which has nothing that would have to be saved."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        self.kill()
        await self._process.wait()
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self) -> None:
        """Take what has arrived. The socket tells of it once, so what stays for another turn has to be asked for."""
        for _ in range(_MESSAGES_AT_ONCE):
            if self._socket.closed or not int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE:
                return  # asking first is cheaper than the exception of a vain attempt
            message = _decoder.decode(self._socket.recv(zmq.NOBLOCK))
            if isinstance(message, StepOutputs):
                self.stats = message.stats
                self.on_outputs(message.outputs)
            elif isinstance(message, Snapshot):
                if not (snapshot := self._snapshots.popleft()).done():
                    snapshot.set_result(message)
            else:
                self._answer.set_result(message)
        self._loop.call_soon(self._receive)


def _own_settings(config: EngineConfig) -> EngineConfig:
    """Without those of the server, which may be secrets: everybody on the machine can read a command line."""
    return EngineConfig(**{field: getattr(config, field) for field in EngineConfig.__struct_fields__})


def _reason(error: OSError | zmq.ZMQError) -> str:
    where = getattr(error, "filename", None)
    return f"{where}: {error.strerror}" if where else str(error.strerror or error)


def _describe(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
