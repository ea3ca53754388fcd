"""`CoreClient`: starts the core process and carries messages to and from it. Imports no torch."""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from configs.errors import UsageError
from configs.settings import EngineConfig

from .machine import core_variables, usable_cores
from .messages import CoreFailed, CoreReady, FromCore, StepOutputs, ToCore, TokenOutput

_ROOT = Path(__file__).parent.parent
_SECONDS_TO_END = 5.0
_READABLE = int(zmq.POLLIN)
_MESSAGES_AT_ONCE = 16
"""Steps that are merged at most before readers get their turn."""
CORE = ("engine.core_process",)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromCore)


class CoreClient:
    """One core process and the only socket to it, in a folder that only this user can enter."""

    def __init__(self, process: Process, socket: zmq.Socket[bytes], folder: str) -> None:
        self._process = process
        self._socket = socket
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[CoreReady | CoreFailed] = self._loop.create_future()
        self.on_outputs: Callable[[list[TokenOutput]], None] = lambda outputs: None
        """Called with the outputs of each step that has any."""
        self._loop.add_reader(socket.FD, self._receive)
        self._receive()

    @classmethod
    async def start(cls, config: EngineConfig, core: Sequence[str] = CORE) -> "CoreClient":
        """Start the process, a module and its first arguments; `wait_ready` waits until it has loaded."""
        folder = tempfile.mkdtemp(prefix="octavo-")
        socket = zmq.Context().socket(zmq.PAIR)
        socket.hwm = 0
        socket.linger = 0
        endpoint = f"ipc://{folder}/core"
        socket.bind(endpoint)
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        variables = core_variables(config.num_threads or usable_cores())
        # -P: a folder named engine/ where the server was started must not be taken for ours
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", *core, endpoint, msgspec.json.encode(config).decode()),
            stdin=PIPE,
            stdout=DEVNULL,
            env={**os.environ, **variables, "PYTHONPATH": path},
        )
        return cls(process, socket, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> CoreReady:
        """What the core has loaded. Raises `UsageError` with its one line when it has given up."""
        end = asyncio.ensure_future(self.wait_end())
        try:
            await asyncio.wait({self._answer, end}, return_when=asyncio.FIRST_COMPLETED)
            if not self._answer.done():  # the last words may still be under way
                await asyncio.wait({self._answer}, timeout=0.2)
            if not self._answer.done():
                raise UsageError(f"the engine process ended while it started, with {end.result()}; see the log")
            answer = self._answer.result()
        finally:
            end.cancel()
        if isinstance(answer, CoreFailed):
            raise UsageError(answer.message)
        shutil.rmtree(self._folder)  # both ends are connected
        return answer

    def send(self, message: ToCore) -> None:
        """Hand `message` to the socket's queue; a core that has ended never gets it."""
        self._socket.send(_encoder.encode(message))
        self._loop.call_soon(self._receive)  # sending may have used up the notice of what has come in meanwhile

    async def wait_end(self) -> str:
        """Wait for the end of the process; says how it ended."""
        return _describe(await self._process.wait())

    async def close(self) -> None:
        """End the process, gently at first, and the socket."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _SECONDS_TO_END)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self) -> None:
        """Take what has arrived. The socket tells of it once, so what stays for another turn has to be asked for."""
        for _ in range(_MESSAGES_AT_ONCE):
            if self._socket.closed or not self._socket.getsockopt(zmq.EVENTS) & _READABLE:
                return  # asking first is cheaper than the exception of a vain attempt
            message = _decoder.decode(self._socket.recv(zmq.NOBLOCK))
            if isinstance(message, StepOutputs):
                self.on_outputs(message.outputs)
            else:
                self._answer.set_result(message)
        self._loop.call_soon(self._receive)


def _describe(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
