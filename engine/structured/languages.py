"""`Languages`: those of the requests, compiled beside the steps.

want ──> cache ─────────────────────────┐
  └───> job (one per StructuredOutput) ─┤ take ──> held until `forget`
             worker thread compiles     │
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from configs.sampling import StructuredOutput
from scheduler.request import Request

from .compiler import Compiler
from .language import Language

logger = logging.getLogger("octavo.engine")

MAX_COMPILE_TIME = 10.0
"""Seconds."""
MAX_CACHE_BYTES = 128 << 20
_MAX_STUCK = 2
"""Workers that are left alone with what they cannot finish in time; a thread cannot be stopped."""
_NICENESS = 5
_WAIT = 0.005
"""Seconds."""
_MIN_ENTRY_BYTES = 4096
"""What an entry of the cache counts at least."""


@dataclass(eq=False)
class _Job:
    structured: StructuredOutput
    requests: dict[str, Request] = field(default_factory=dict)
    started: float | None = None
    """On the monotonic clock; the time for loading xgrammar does not count."""
    is_late: bool = False
    is_cancelled: bool = False
    ends_worker: bool = False
    """Another worker has taken over."""


Outcome = Language | str
"""The language, or why there is none."""


class Languages:
    """Called by the thread that owns the core; one more thread compiles, one language at a time."""

    def __init__(self, load: Callable[[], Compiler]) -> None:
        """`load` is called by the worker, at the first request."""
        self._load = load
        self._load_lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._todo: SimpleQueue[_Job | None] = SimpleQueue()  # None: the worker may go
        self._done: SimpleQueue[tuple[_Job, Outcome]] = SimpleQueue()
        self._jobs: dict[StructuredOutput, _Job] = {}  # queued or running
        self._cache: OrderedDict[StructuredOutput, Outcome] = OrderedDict()  # least recently used first
        self._cache_bytes = 0
        self._ready: list[tuple[Request, Outcome]] = []
        self._held: dict[str, Language] = {}  # by request id
        self._num_workers = 0  # those that are not stuck

    @property
    def has_work(self) -> bool:
        """Whether `take` has, or will have, something to give."""
        return bool(self._ready) or any(job.requests for job in self._jobs.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their language."""
        return len(self._ready) + sum(len(job.requests) for job in self._jobs.values())

    def __contains__(self, request_id: str) -> bool:
        """Whether the request waits for its language."""
        waiting = any(request_id in job.requests for job in self._jobs.values())
        return waiting or any(request.request_id == request_id for request, _ in self._ready)

    def want(self, request: Request) -> None:
        """Compile the request's language, if nobody has."""
        structured = request.sampling_params.structured
        assert structured is not None
        if (outcome := self._cache.get(structured)) is not None:
            self._cache.move_to_end(structured)
            self._ready.append((request, outcome))
            return
        job = self._jobs.get(structured)
        if job is None:
            job = self._jobs[structured] = _Job(structured)
            self._todo.put(job)
            self._employ()
        job.requests[request.request_id] = request
        if job.is_late or not self._num_workers:
            self._give_up(job)

    def take(self, *, wait: bool) -> list[tuple[Request, str | None]]:
        """Requests whose language is held from now on, or why they have none; waits a few milliseconds if told to."""
        wait = wait and not self._ready
        while True:
            try:
                job, outcome = self._done.get(timeout=_WAIT) if wait else self._done.get_nowait()
            except Empty:
                break
            wait = False
            self._finish(job, outcome)
        for job in list(self._jobs.values()):
            if job.started is not None and not job.is_late and time.monotonic() - job.started > MAX_COMPILE_TIME:
                self._leave_alone(job)
        ready, self._ready = self._ready, []
        for request, outcome in ready:
            if isinstance(outcome, Language):
                self._held[request.request_id] = outcome
        return [(request, outcome if isinstance(outcome, str) else None) for request, outcome in ready]

    def of(self, request_id: str) -> Language | None:
        return self._held.get(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, or do not want their language any more; others are ignored."""
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self._ready = [entry for entry in self._ready if entry[0].request_id != request_id]
            for job in list(self._jobs.values()):
                if job.requests.pop(request_id, None) and not job.requests and job.started is None:
                    job.is_cancelled = True
                    del self._jobs[job.structured]

    def _finish(self, job: _Job, outcome: Outcome) -> None:
        if self._jobs.get(job.structured) is job:
            del self._jobs[job.structured]
        self._remember(job.structured, outcome)
        self._ready += [(request, outcome) for request in job.requests.values()]
        if job.is_late and not job.ends_worker:  # all were stuck: this worker goes on
            self._num_workers += 1

    def _remember(self, structured: StructuredOutput, outcome: Outcome) -> None:
        if structured in self._cache:
            return
        self._cache[structured] = outcome
        self._cache_bytes += _size(structured, outcome)
        while self._cache_bytes > MAX_CACHE_BYTES:
            self._cache_bytes -= _size(*self._cache.popitem(last=False))

    def _leave_alone(self, job: _Job) -> None:
        job.is_late = True
        self._num_workers -= 1
        self._give_up(job)
        if sum(each.is_late for each in self._jobs.values()) < _MAX_STUCK:
            job.ends_worker = True
            self._employ()
        else:
            for each in self._jobs.values():
                self._give_up(each)

    def _give_up(self, job: _Job) -> None:
        reason = f"it takes more than {MAX_COMPILE_TIME:.0f} seconds to compile"
        if not job.is_late:
            reason = "the compiler is busy with others that take long; try again later"
        self._ready += [(request, reason) for request in job.requests.values()]
        job.requests.clear()

    def _employ(self) -> None:
        stuck = sum(job.is_late for job in self._jobs.values())
        if not self._num_workers and stuck < _MAX_STUCK:
            self._num_workers += 1
            worker = threading.Thread(target=self._work, name="octavo-languages", daemon=True)
            worker.start()
            # An interpreter that ends while a thread is inside of xgrammar would be aborted by the C++ runtime.
            atexit.register(self._dismiss, worker)

    def _dismiss(self, worker: threading.Thread) -> None:
        self._todo.put(None)
        worker.join(MAX_COMPILE_TIME)

    def _work(self) -> None:
        if sys.platform == "linux":  # where niceness is a thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            job = self._todo.get()
            if job is None:
                return
            if job.is_cancelled:
                continue
            self._done.put((job, self._compile(job)))
            if job.ends_worker:
                return

    def _compile(self, job: _Job) -> Outcome:
        try:
            with self._load_lock:
                if self._compiler is None:
                    self._compiler = self._load()
            job.started = time.monotonic()
            return self._compiler.compile(job.structured)
        except ImportError as error:
            logger.warning("structured outputs: %s", error)
            return "structured outputs need xgrammar: pip install xgrammar"
        except ValueError as error:
            return f"{job.structured.kind} cannot be used: {error}"
        except Exception as error:
            logger.exception("structured outputs: a %s of %d bytes", job.structured.kind, len(job.structured.source))
            return f"{job.structured.kind} cannot be used: {type(error).__name__}"


def _size(structured: StructuredOutput, outcome: Outcome) -> int:
    return _MIN_ENTRY_BYTES + len(structured.source) + (outcome.num_bytes if isinstance(outcome, Language) else 0)
