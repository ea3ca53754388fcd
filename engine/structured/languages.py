"""`ThreadedLanguages`: those of the requests, compiled beside the steps.

want ──> cache ────────────────────────────────────────────────────┐
  └───> job (one per StructuredOutput) ──> what is cheap: compiled ┤ take ──> held until `forget`
                └──> what may not be: a trial, then compiled ──────┘
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

from configs.errors import CompilerBusy, InvalidRequest, RequestError
from configs.sampling import StructuredOutput
from scheduler.request import Request

from .compiler import Compiler
from .costs import is_cheap
from .language import Language, Languages
from .trial import MAX_COMPILE_TIME, TrialProcess

logger = logging.getLogger("octavo.engine")

MAX_CACHE_BYTES = 128 << 20
MAX_WAIT = 20.0
"""Seconds that a costly grammar waits for others."""
_COSTLY_WORKERS = 2
_MAX_LANGUAGE_BYTES = MAX_CACHE_BYTES // 2
_NICENESS = 5
_WAIT = 0.005
"""Seconds."""
_MIN_ENTRY_BYTES = 4096
"""What an entry of the cache counts at least."""


@dataclass(eq=False)
class _Job:
    structured: StructuredOutput
    requests: dict[str, Request] = field(default_factory=dict)
    waits_since: float | None = None
    """For a costly one's turn; on the monotonic clock."""
    is_cancelled: bool = False


Outcome = Language | RequestError
"""The language, or why there is none."""
_Jobs = SimpleQueue[_Job | None]
"""None: a worker may go."""


class ThreadedLanguages(Languages):
    """Called by the thread that owns the core; others compile: one what is cheap, some what may not be."""

    def __init__(self, load: Callable[[], Compiler], trials: TrialProcess) -> None:
        """`load` is called by a worker, at the first request."""
        self._load = load
        self._trials = trials
        self._load_lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._todo: _Jobs = SimpleQueue()
        self._costly: _Jobs = SimpleQueue()
        self._done: SimpleQueue[tuple[_Job, Outcome]] = SimpleQueue()
        self._jobs: dict[StructuredOutput, _Job] = {}  # queued or running
        self._cache: OrderedDict[StructuredOutput, Outcome] = OrderedDict()  # least recently used first
        self._cache_bytes = 0
        self._ready: list[tuple[Request, Outcome]] = []
        self._held: dict[str, Language] = {}  # by request id
        self._workers: list[threading.Thread] = []

    @property
    def num_waiting(self) -> int:
        return len(self._ready) + sum(len(job.requests) for job in self._jobs.values())

    def __contains__(self, request_id: str) -> bool:
        waiting = any(request_id in job.requests for job in self._jobs.values())
        return waiting or any(request.request_id == request_id for request, _ in self._ready)

    def want(self, request: Request) -> None:
        structured = request.sampling_params.structured
        assert structured is not None
        if (outcome := self._cache.get(structured)) is not None:
            self._cache.move_to_end(structured)
            self._ready.append((request, outcome))
            return
        job = self._jobs.get(structured)
        if job is None:
            job = self._jobs[structured] = _Job(structured)
            if not self._workers:
                self._employ(self._sort_out, self._todo)
            self._todo.put(job)
        job.requests[request.request_id] = request

    def take(self, *, wait: bool) -> list[tuple[Request, RequestError | None]]:
        wait = wait and not self._ready
        while True:
            try:
                job, outcome = self._done.get(timeout=_WAIT) if wait else self._done.get_nowait()
            except Empty:
                break
            wait = False
            self._finish(job, outcome)
        for job in list(self._jobs.values()):
            if job.waits_since is not None and time.monotonic() - job.waits_since > MAX_WAIT:
                job.is_cancelled = True
                self._finish(job, CompilerBusy("grammars of other requests take long to compile; try again later"))
        ready, self._ready = self._ready, []
        for request, outcome in ready:
            if isinstance(outcome, Language):
                self._held[request.request_id] = outcome
        return [(request, None if isinstance(outcome, Language) else outcome) for request, outcome in ready]

    def of(self, request_id: str) -> Language | None:
        return self._held.get(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self._ready = [entry for entry in self._ready if entry[0].request_id != request_id]
            for job in list(self._jobs.values()):
                if job.requests.pop(request_id, None) and not job.requests:
                    job.is_cancelled = True
                    del self._jobs[job.structured]

    def _finish(self, job: _Job, outcome: Outcome) -> None:
        if self._jobs.get(job.structured) is job:
            del self._jobs[job.structured]
        if not isinstance(outcome, CompilerBusy):
            self._remember(job.structured, outcome)
        self._ready += [(request, outcome) for request in job.requests.values()]
        job.requests.clear()

    def _remember(self, structured: StructuredOutput, outcome: Outcome) -> None:
        if structured in self._cache:
            return
        self._cache[structured] = outcome
        self._cache_bytes += _size(structured, outcome)
        while self._cache_bytes > MAX_CACHE_BYTES:
            self._cache_bytes -= _size(*self._cache.popitem(last=False))

    def _employ(self, work: Callable[[_Job], Outcome | None], jobs: _Jobs) -> None:
        worker = threading.Thread(target=self._work, args=(work, jobs), name="octavo-languages", daemon=True)
        self._workers.append(worker)
        worker.start()
        # An interpreter that ends while a thread is inside of xgrammar would be aborted by the C++ runtime.
        atexit.register(self._dismiss, worker, jobs)

    def _dismiss(self, worker: threading.Thread, jobs: _Jobs) -> None:
        self._trials.close()
        jobs.put(None)
        worker.join(MAX_COMPILE_TIME)

    def _work(self, work: Callable[[_Job], Outcome | None], jobs: _Jobs) -> None:
        if sys.platform == "linux":  # where niceness is a thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (job := jobs.get()) is not None:
            job.waits_since = None
            if not job.is_cancelled and (outcome := self._outcome(work, job)) is not None:
                self._done.put((job, outcome))

    def _outcome(self, work: Callable[[_Job], Outcome | None], job: _Job) -> Outcome | None:
        kind = job.structured.kind
        try:
            return work(job)
        except ImportError as error:
            logger.warning("structured outputs: %s", error)
            return _refused("structured outputs need xgrammar: pip install xgrammar")
        except CompilerBusy as error:
            return error
        except OSError as error:  # of the system, which may be short of memory or of processes for now
            logger.warning("structured outputs: %s", error)
            return CompilerBusy("the compiler of grammars could not be started; try again")
        except (InvalidRequest, ValueError) as error:
            return _refused(f"{kind} cannot be used: {error}")
        except Exception as error:
            logger.exception("structured outputs: a %s of %d bytes", kind, len(job.structured.source))
            return _refused(f"{kind} cannot be used: {type(error).__name__}")

    def _sort_out(self, job: _Job) -> Outcome | None:
        if is_cheap(job.structured):
            return self._loaded().compile(job.structured)
        if len(self._workers) == 1:
            for _ in range(_COSTLY_WORKERS):
                self._employ(self._try, self._costly)
        job.waits_since = time.monotonic()
        self._costly.put(job)
        return None

    def _try(self, job: _Job) -> Outcome:
        self._trials.start()  # it loads the same things at the same time
        self._loaded()
        trial = self._trials.compile(job.structured, lambda: not self._costly.empty())
        if trial.error is not None:
            raise ValueError(trial.error)
        if trial.num_bytes > _MAX_LANGUAGE_BYTES:
            raise ValueError(f"it takes more than {_MAX_LANGUAGE_BYTES >> 20} MB when it is compiled")
        language = self._loaded().compile(job.structured)
        language.num_bytes = trial.num_bytes
        return language

    def _loaded(self) -> Compiler:
        with self._load_lock:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param="structured")


def _size(structured: StructuredOutput, outcome: Outcome) -> int:
    return _MIN_ENTRY_BYTES + len(structured.source) + (outcome.num_bytes if isinstance(outcome, Language) else 0)
