"""`Telemetry`: all of this around one engine."""

import contextlib
from collections.abc import Callable
from typing import Protocol

from configs.errors import Unavailable
from configs.settings import ServerConfig
from engine.messages import RequestSnapshot, Snapshot
from engine.observer import Observer
from server.metrics.exposition import Exposition
from server.metrics.families import EngineStats, Source
from server.metrics.figures import Figures
from server.metrics.ledger import Ledger
from server.metrics.records import RequestRecord
from server.metrics.request_log import log_request
from server.metrics.snapshots import Snapshots
from server.metrics.timelines import timeline_of
from server.metrics.watcher import Watcher
from server.protocol.timelines import RequestTimeline


class ObservedEngine(EngineStats, Protocol):
    observer: Observer

    @property
    def pid(self) -> int: ...

    async def snapshot(self) -> Snapshot: ...


class Telemetry:
    def __init__(
        self, engine: ObservedEngine, config: ServerConfig, model: str, num_requests: Callable[[], int]
    ) -> None:
        """Observes `engine` from now on. `num_requests` tells how many are being answered."""
        self.figures = Figures(engine.info)
        self.ledger = Ledger(self.figures, config.max_kept_timelines, self._tell)
        self._watcher = Watcher(self.figures)
        self.snapshots = Snapshots(engine)
        self.owner_of = self._watcher.owner_of
        self._engine = engine
        self._config = config
        self._model = model
        self._num_requests = num_requests
        self._exposition = Exposition(self._source, model, lambda: engine.pid)
        engine.observer = self._watcher
        self._trace: Callable[[RequestRecord], None] | None = None
        if config.otlp_traces_endpoint is not None:
            from server.metrics.tracing import start_tracing  # brings packages that few have

            self._trace = start_tracing(config.otlp_traces_endpoint, model)

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """See `Exposition.document`."""
        return await self._exposition.document(accept)

    async def timeline(self, record: RequestRecord) -> RequestTimeline:
        snapshots: dict[str, RequestSnapshot] = {}
        if record.ended is None:
            with contextlib.suppress(Unavailable, TimeoutError):  # what was told before is better than nothing
                snapshot = await self.snapshots.latest()
                snapshots = {one.request_id: one for one in snapshot.requests}
        return timeline_of(record, self._model, snapshots, self._watcher.causes)

    def _source(self) -> Source:
        engine = self._engine
        return Source(
            self.figures,
            engine.info,
            engine.stats(),
            engine.health(),
            engine.num_restarts,
            self._num_requests(),
            self._config,
        )

    def _tell(self, record: RequestRecord) -> None:
        log_request(record, self._model)
        if self._trace is not None:
            self._trace(record)
