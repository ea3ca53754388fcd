"""`CoreClient`: starts the core process and carries messages to and from it. Imports no torch."""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from configs.errors import UsageError
from configs.settings import EngineConfig

from .machine import core_variables, usable_cores
from .messages import CoreFailed, CoreReady, FromCore, StepOutputs, ToCore, TokenOutput

_ROOT = Path(__file__).parent.parent
_SECONDS_TO_END = 5.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromCore)


class CoreClient:
    """One core process and the only socket to it, in a folder that only this user can enter."""

    def __init__(self, process: Process, socket: zmq.asyncio.Socket, context: zmq.asyncio.Context, folder: str) -> None:
        self._process = process
        self._socket = socket
        self._context = context
        self._folder = folder

    @classmethod
    async def start(cls, config: EngineConfig) -> "CoreClient":
        """Start the process; `wait_ready` waits until it has loaded."""
        folder = tempfile.mkdtemp(prefix="octavo-")
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        socket.hwm = 0
        socket.linger = 0
        endpoint = f"ipc://{folder}/core"
        socket.bind(endpoint)
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        variables = core_variables(config.num_threads or usable_cores())
        # -P: a folder named engine/ where the server was started must not be taken for ours
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "engine.core_process", endpoint, msgspec.json.encode(config).decode()),
            stdin=PIPE,
            stdout=DEVNULL,
            env={**os.environ, **variables, "PYTHONPATH": path},
        )
        return cls(process, socket, context, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> CoreReady:
        """What the core has loaded. Raises `UsageError` with its one line when it has given up."""
        message = asyncio.ensure_future(self._receive())
        end = asyncio.ensure_future(self.wait_end())
        try:
            await asyncio.wait({message, end}, return_when=asyncio.FIRST_COMPLETED)
            if not message.done():  # the last words may still be under way
                await asyncio.wait({message}, timeout=0.2)
            if not message.done():
                raise UsageError(f"the engine process ended while it started, with {end.result()}; see the log")
            answer = message.result()
        finally:
            message.cancel()
            end.cancel()
        if isinstance(answer, CoreFailed):
            raise UsageError(answer.message)
        assert isinstance(answer, CoreReady), answer
        shutil.rmtree(self._folder)  # both ends are connected
        return answer

    def send(self, message: ToCore) -> None:
        """Hand `message` to the socket's queue; a core that has ended never gets it."""
        self._socket.send(_encoder.encode(message))

    async def receive(self) -> list[TokenOutput]:
        """Outputs of the next step that has any. Waits for ever when the core has ended."""
        message = await self._receive()
        assert isinstance(message, StepOutputs), message
        return message.outputs

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
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _receive(self) -> FromCore:
        return _decoder.decode(await self._socket.recv())


def _describe(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
