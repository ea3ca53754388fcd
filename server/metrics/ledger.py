"""`Ledger`: the requests that run, and the latest of those that have ended."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

from starlette.types import Scope

from configs.errors import EngineDead, InvalidRequest, QueueFull, RequestError, ShuttingDown, Unavailable, shown
from server.metrics.figures import Figures
from server.metrics.records import CURRENT, RequestRecord
from server.security.request_ids import CURRENT as CURRENT_ID

RECORD = "octavo.record"
"""Key in the scope of a request: its `RequestRecord`."""
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Ledger:
    def __init__(self, figures: Figures, max_kept: int, tell: Callable[[RequestRecord], None]) -> None:
        """`max_kept` choices, of all ended requests together. `tell` is called with each request when all is over."""
        self._figures = figures
        self._max_kept = max_kept
        self._tell = tell
        self._running: set[RequestRecord] = set()
        self._kept: deque[RequestRecord] = deque()
        self._num_kept = 0
        self._by_id: dict[tuple[str, str], RequestRecord] = {}  # of those that are kept, by owner and either id

    def find(self, request_id: str, owner: str) -> RequestRecord | None:
        """One of this owner's, by X-Request-Id or by the id of the answer; the newest, where several have the same."""
        own = [record for record in self._running if record.owner == owner]
        running = [record for record in own if request_id in (record.name, record.response_id)]
        newest = max(running, key=lambda record: record.received, default=None)
        return newest or self._by_id.get((owner, request_id))

    @contextlib.contextmanager
    def following(self, scope: Scope) -> Iterator[RequestRecord]:
        """Around a request and its answer."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        record = RequestRecord(time.monotonic(), time.time(), method)
        scope[RECORD] = record
        CURRENT.set(record)
        try:
            yield record
        finally:
            self.release(record)

    def begin_work(self, record: RequestRecord, scope: Scope) -> None:
        record.is_work = True
        record.name = CURRENT_ID.get()
        record.trace_context = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS
        }
        self._running.add(record)

    def claim(self, request_id: str) -> None:
        """For the current request, until it is over. Raises `InvalidRequest` if another of its owner has this id."""
        if (record := CURRENT.get()) is None:
            return
        if any(one.claimed_id == request_id and one.owner == record.owner for one in self._running - {record}):
            raise InvalidRequest(f"request id {shown(request_id)} is in use", param="request_id")
        record.claimed_id = request_id

    def hold(self) -> Callable[[], None]:
        """Keep the current request from being over; the function that is returned lets it go."""
        record = CURRENT.get()
        if record is None:
            return lambda: None
        record.num_holders += 1
        return lambda: self.release(record)

    def note_error(self, record: RequestRecord, error: Exception, status: int) -> None:
        record.status = status
        if isinstance(error, RequestError):
            record.error = error.code or error.type
            reason = None if record.num_choices else _refusal(error)
            if reason is not None:
                self._figures.refused[reason] += 1
        else:
            record.error = "server_error" if status >= 500 else None

    def release(self, record: RequestRecord) -> None:
        record.num_holders -= 1
        if record.num_holders:
            return
        record.ended = time.monotonic()
        self._figures.note_request(record)
        if record.is_work:
            self._running.discard(record)
            self._keep(record)
            self._tell(record)

    def _keep(self, record: RequestRecord) -> None:
        self._kept.append(record)
        self._num_kept += max(1, len(record.choices))
        self._by_id |= dict.fromkeys(_keys(record), record)
        while self._num_kept > self._max_kept:
            oldest = self._kept.popleft()
            self._num_kept -= max(1, len(oldest.choices))
            for key in _keys(oldest):
                if self._by_id.get(key) is oldest:
                    del self._by_id[key]


def _keys(record: RequestRecord) -> list[tuple[str, str]]:
    return [(record.owner, name) for name in (record.name, record.response_id) if name]


def _refusal(error: RequestError) -> str | None:
    if isinstance(error, QueueFull):
        return "queue_full"
    if isinstance(error, ShuttingDown):
        return "shutting_down"
    return "engine" if isinstance(error, Unavailable | EngineDead) else None
