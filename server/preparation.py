"""Large requests become prompts in turn, off the event loop: parsing, templates and tokenizing take them seconds."""

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from configs.errors import QueueFull
from server.sse import until_disconnect

Result = TypeVar("Result")
Work = Callable[[], Coroutine[Any, Any, Result]]
"""Called where it is to run."""

SMALL_BYTES = 32 * 2**10
"""Bodies up to this size are prepared where they are read: faster than a thread. They wait for no others."""
_MEDIUM_BYTES = 2**19
_MEDIUM_AT_ONCE = 2
_BODIES = 4
"""Bodies of the largest size that may be held until they are prompts."""
_HELD = "octavo.held_bytes"
"""Key in the scope of a request with a large body: its bytes."""
_RETRY_AFTER = 5
"""Seconds."""


class Preparation:
    """Bounds the large bodies that are being read or wait; one of them, and two of medium size, are worked at."""

    def __init__(self, max_body_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = _BODIES * max_body_bytes
        self._medium, self._large = asyncio.Semaphore(_MEDIUM_AT_ONCE), asyncio.Semaphore(1)

    def hold(self, scope: Scope, num_bytes: int) -> None:
        """Note how many bytes of a large body are here by now. Raises `QueueFull`."""
        more = num_bytes - scope.get(_HELD, 0)
        if self.num_bytes and self.num_bytes + more > self._max_bytes:
            message = f"{self.num_bytes} bytes of other requests wait already"
            raise QueueFull(message, retry_after=_RETRY_AFTER)
        scope[_HELD] = num_bytes
        self.num_bytes += more

    def release(self, scope: Scope) -> None:
        """The body of this request is not needed any more."""
        if not (num_bytes := scope.pop(_HELD, 0)):
            return
        self.num_bytes -= num_bytes
        if num_bytes > _MEDIUM_BYTES:
            asyncio.get_running_loop().run_in_executor(None, _return_memory)

    async def prepare(self, request: Request, work: Work[Result]) -> Result:
        """`run`, behind which the body is not needed any more."""
        if _HELD not in request.scope:
            return await work()
        try:
            return await self.run(request, work)
        finally:
            self.release(request.scope)

    async def run(self, request: Request, work: Work[Result]) -> Result:
        """The result of `work` on a large body, which has been read. Raises `ClientGone` when the client goes away."""
        turns = self._medium if request.scope[_HELD] <= _MEDIUM_BYTES else self._large
        return await until_disconnect(request.receive, _in_turn(turns, work))


async def _in_turn(turns: asyncio.Semaphore, work: Work[Result]) -> Result:
    """Await `work` in a thread, on an event loop of its own. The turn lasts until it has ended.

    Cancelling waits for nothing: the work ends where it next awaits something.
    """
    await turns.acquire()
    loop = asyncio.get_running_loop()
    result: Future[Result] = Future()

    async def main() -> Result:
        own_loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(_: Future[Result]) -> None:  # unless it has ended
            with contextlib.suppress(RuntimeError):
                own_loop.call_soon_threadsafe(task.cancel)

        result.add_done_callback(stop)
        return await work()

    def run() -> None:
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            try:
                result.set_result(asyncio.run(main()))
            except BaseException as error:
                result.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(turns.release)

    context = contextvars.copy_context()
    try:
        threading.Thread(target=context.run, args=(run,), name="octavo-preparation", daemon=True).start()
    except BaseException:  # the system gives us no thread
        turns.release()
        raise
    return await asyncio.wrap_future(result)


def _return_memory() -> None:
    """To the system, where the C library keeps it otherwise."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
