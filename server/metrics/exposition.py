"""The metrics in Prometheus's forms. Nothing is kept for it: each scrape reads what is there."""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from server.metrics.families import FAMILIES, Family, Source
from server.metrics.histogram import Histogram

ENGINE = "0"
"""The label `engine`: there is one."""
_KINDS: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}
OPENMETRICS, PLAIN = "application/openmetrics-text", "text/plain"
_END = b"# EOF\n"
"""Of a document in the first of them."""
_NUMBER = re.compile(r"\d(\.\d{1,3})?")


class Exposition:
    def __init__(self, source: Callable[[], Source], model: str, engine_pid: Callable[[], int]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(source, model))
        ProcessCollector(registry=self._registry)
        ProcessCollector(namespace="octavo_engine", pid=engine_pid, registry=self._registry)

    async def document(self, accept: str) -> tuple[bytes, str]:
        """In the form that a client that sends this `Accept` likes best, with its media type.

        All is of one moment; it is written bit by bit, so that streams go on meanwhile.
        """
        in_openmetrics = _weight(accept, OPENMETRICS) > _weight(accept, PLAIN)
        encode = openmetrics.generate_latest if in_openmetrics else generate_latest
        pieces = []
        for metric in list(self._registry.collect()):
            # no name needs escaping; without being told so, the encoders take colons for wrong
            pieces.append(encode(_Single(metric), escaping=openmetrics.ALLOWUTF8).removesuffix(_END))
            await asyncio.sleep(0)
        if in_openmetrics:
            return b"".join([*pieces, _END]), f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
        return b"".join(pieces), f"{PLAIN}; version=0.0.4; charset=utf-8"


def _weight(accept: str, media_type: str) -> float:
    """How much a client that sends this `Accept` wants the type, which it has to name."""
    weights = [0.0]
    for entry in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in entry.split(";"))
        if kind == media_type:
            quality = [piece.removeprefix("q=") for piece in parameters if piece.startswith("q=")]
            weights.append(float(quality[0]) if quality and _NUMBER.fullmatch(quality[0]) else 1.0)
    return max(weights)


class _Single(CollectorRegistry):
    """A registry of one metric, which has been collected."""

    def __init__(self, metric: Metric) -> None:
        super().__init__(auto_describe=False)
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


class _Families(Collector):
    def __init__(self, source: Callable[[], Source], model: str) -> None:
        self._source = source
        self._model = model

    def collect(self) -> Iterator[Metric]:
        source = self._source()
        for family in FAMILIES:
            yield self._metric(family, source)

    def _metric(self, family: Family, source: Source) -> Metric:
        common = {"model_name": self._model, "engine": ENGINE} if family.of_engine else {}
        metric: Metric = _KINDS[family.kind](family.name, family.help, labels=[*common, *family.labels])
        add: Any = metric.add_metric  # type: ignore[attr-defined]
        for own, value in family.samples(source):
            labels = [*common.values(), *own]
            if isinstance(value, Histogram):
                add(labels, buckets=value.buckets(), sum_value=value.sum)
            else:
                add(labels, value)
        return metric
