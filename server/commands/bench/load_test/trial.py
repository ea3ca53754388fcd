"""One run against one server after another, and what several of them say together."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tqdm import tqdm

from configs.errors import UsageError

from . import arrivals
from .answer import Answer
from .confidence import half_width
from .datasets import GENERATORS, Draws, Sample
from .driver import Load, OnAnswer, Run, drive
from .measure import figures, wrong_figures
from .prompts import PromptMaker, prompt_maker
from .target import Ask, Target

SUMS = (
    *("duration", "completed", "failed", "total_input_tokens", "total_cached_tokens", "total_output_tokens"),
    *("probe_completed", "probe_failed"),
)
PEAKS = ("max_output_tokens_per_s", "peak_concurrent_requests", "probe_max_e2el_ms")


@dataclass
class Trial:
    """One run, or several under equal conditions."""

    rate: float
    """Requests per second that were offered; infinite for a closed loop, not a number for a ramp."""
    runs: list[Run]
    figures: list[dict[str, Any]]
    """Of each run. A figure that was the client's is None, and `client` says why."""

    @property
    def combined(self) -> dict[str, Any]:
        return combine(self.figures)

    @property
    def is_wrong(self) -> bool:
        """For some figure the client was the bottleneck."""
        return any(found["client"]["bottleneck"] for found in self.figures)

    @property
    def interrupted(self) -> bool:
        return any(run.interrupted for run in self.runs)

    @property
    def answers(self) -> list[Answer]:
        return [answer for run in self.runs for answer in run.answers]


class Bench:
    """A server that is ready, and the workload for it."""

    def __init__(self, target: Target, arguments: argparse.Namespace, maker: PromptMaker | None, side: str) -> None:
        self.target = target
        self.arguments = arguments
        self._maker = maker
        self._side = side
        self._num_read = 0

    @classmethod
    async def open(cls, url: str, arguments: argparse.Namespace, side: str = "") -> "Bench":
        """Waits for the server, asks it a first request, and warms it up. Raises `UsageError`.

        Prompts of another `side` have equal lengths and other contents.
        """
        target = Target(url, arguments)
        try:
            await target.wait_until_ready(arguments.ready_check_timeout_sec)
            maker = await prompt_maker(target) if arguments.dataset_name in GENERATORS else None
            bench = cls(target, arguments, maker, side)
            await bench._warm_up()
        except BaseException:
            target.close()
            raise
        return bench

    @property
    def prompts(self) -> str:
        """How prompts are made."""
        return self._maker.description if self._maker else f"lines of {self.arguments.dataset_path}"

    def samples(self, count: int, draws: Draws) -> list[Sample]:
        """Lines of a file follow each other from one run to the next, and begin anew at its end."""
        if self._maker:
            return GENERATORS[self.arguments.dataset_name](self.arguments, self._maker, count, draws)
        lines: list[Sample] = self.arguments.lines
        begin, self._num_read = self._num_read, self._num_read + count
        return [lines[index % len(lines)] for index in range(begin, begin + count)]

    async def run(self, rate: float, name: object, *, count: int | None = None, stop: OnAnswer | None = None) -> Run:
        """Equal names give equal lengths and arrivals."""
        arguments, count = self.arguments, count or self.arguments.num_prompts
        draws = Draws.of(arguments.seed, name, self._side)
        samples = self.samples(count, draws)
        load = Load(
            arrivals=_arrivals(rate, count, arguments, draws),
            max_concurrency=arguments.max_concurrency,
            think_time=arguments.think_time,
            probe_rate=arguments.probe_request_rate,
        )
        with progress_bar(sum(map(len, samples)), arguments, self.target.url) as bar:

            def on_answer(answer: Answer) -> bool:
                bar.update()
                return stop is not None and stop(answer)

            return await drive(self.target, samples, load, on_answer)

    def measured(self, run: Run) -> dict[str, Any]:
        """The figures of a run, without those that were the client's."""
        arguments = self.arguments
        found = figures(run, arguments.goodput, arguments.metric_percentiles, arguments.percentile_metrics)
        reasons = wrong_figures(run, found, arguments.metric_percentiles, arguments.percentile_metrics)
        found |= dict.fromkeys(reasons)
        found["client"] = {"bottleneck": bool(reasons), "reasons": reasons, **run.health.as_json()}
        return found

    async def _warm_up(self) -> None:
        """The first request, which must be answered, then the others together."""
        arguments, draws = self.arguments, Draws.of(self.arguments.seed, "warm-up", self._side)
        read = self._num_read
        samples = self.samples(1 + arguments.num_warmups, draws)
        self._num_read = read
        await self.target.check(samples[0][0])
        if arguments.num_warmups:
            load = Load(max_concurrency=arguments.max_concurrency)
            run = await drive(self.target, [sample[:1] for sample in samples[1:]], load, lambda answer: False)
            if run.interrupted:
                raise UsageError("interrupted during the warm-up")

    async def drain(self) -> None:
        """Wait for a small request, behind what the server may still have to do, whatever comes of it."""
        await self.target.send(Ask("Hi", 1), Answer(0.0))

    def close(self) -> None:
        self.target.close()


def progress_bar(total: int, arguments: argparse.Namespace, what: str) -> "tqdm[Any]":
    """On stderr, when that is a terminal."""
    tqdm.monitor_interval = 0  # no thread of its own beside the clock's reader
    return tqdm(total=total, desc=what, unit="req", leave=False, disable=True if arguments.disable_tqdm else None)


def _arrivals(rate: float, count: int, arguments: argparse.Namespace, draws: Draws) -> list[float] | None:
    if arguments.ramp_up_strategy is not None:
        ramp = arrivals.Ramp(arguments.ramp_up_strategy, arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
        return arrivals.ramped(count, ramp, arguments.burstiness, draws.arrivals)
    return None if math.isinf(rate) else arrivals.steady(count, rate, arguments.burstiness, draws.arrivals)


def combine(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts are added, peaks are the highest, and all else are means with the 95 % confidence they deserve."""
    if len(repeats) == 1:
        return dict(repeats[0])
    found: dict[str, Any] = {}
    confidence: dict[str, list[float]] = {}
    for name in (name for name in repeats[0] if name != "client"):
        values = [each.get(name) for each in repeats]
        numbers = [value for value in values if value is not None]
        if len(numbers) < len(values):
            found[name] = None
        elif name in SUMS or name in PEAKS:
            found[name] = (sum if name in SUMS else max)(numbers)
        else:
            found[name], half = mean(numbers), half_width(numbers)
            confidence[name] = [found[name] - half, found[name] + half]
    clients = [each["client"] for each in repeats]
    client = {name: max(each[name] for each in clients) for name in clients[0] if name != "reasons"}
    client["reasons"] = {what: why for each in clients for what, why in each["reasons"].items()}
    return {**found, "client": client, "confidence_95": confidence, "repeats": list(repeats)}
