"""`octavo bench sweep URL --goodput …`: the highest rate at which enough requests keep their limits."""

import argparse
import asyncio
import math
from typing import Any

from server.commands.serve import loop_factory

from .client_health import percentile
from .load import Bench, Run, swallow_interrupt
from .measure import Trial, concurrency, is_good, measured
from .report import print_row, publish, trial_json
from .serve import INTERRUPTED, NOT_VALID, complete
from .target import Response
from .web_report import page

MIN_PROMPTS = 10
MAX_HALVINGS = 6
COLUMNS = ("req/s", "requests", "good", "P99 TTFT", "P99 E2EL", "")


def run(config: None, arguments: argparse.Namespace) -> int:
    """1 when no rate held or the client was the bottleneck, 130 after Ctrl-C."""
    complete(arguments)
    arguments.metric_percentiles = sorted({*arguments.metric_percentiles, 99.0})
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_sweep(arguments))


class Sweep:
    """The search: doubling the rate until one does not hold, then halving the gap, on a logarithmic scale."""

    def __init__(self, bench: Bench, arguments: argparse.Namespace) -> None:
        self.bench = bench
        self.arguments = arguments
        self.trials: list[Trial] = []
        self.highest: float | None = None
        """The highest rate that held, in requests per second."""
        self.lowest: float | None = None
        """The lowest rate that did not."""
        self.ended: str | None = None
        """Why the search ended before its time."""

    async def search(self) -> None:
        """Ends when the rates are within --precision of each other, at --max-rate, or when even start / 64 fails."""
        rate: float | None = min(self.arguments.start_rate, self.arguments.max_rate)
        while rate is not None:
            holds = await self._holds(rate)
            if self.ended is not None:
                return
            if holds:
                self.highest = rate
            else:
                self.lowest = rate
            rate = self._next()

    def _next(self) -> float | None:
        arguments, low, high = self.arguments, self.highest, self.lowest
        if low is None:
            assert high is not None
            return high / 2 if high > arguments.start_rate / 2**MAX_HALVINGS else None
        if high is None:
            return min(2 * low, arguments.max_rate) if low < arguments.max_rate else None
        return math.sqrt(low * high) if high / low > 1 + arguments.precision else None

    async def _holds(self, rate: float) -> bool:
        """Whether enough of the requests of this rate are good; a trial ends once too many are not."""
        count = max(MIN_PROMPTS, round(rate * self.arguments.duration))
        most = count - math.ceil(self.arguments.attainment * count - 1e-9)
        try:
            await self.bench.drain()
        except asyncio.CancelledError:
            swallow_interrupt()
            self.ended = "interrupted"
            return False
        bad = 0

        def stop(response: Response) -> bool:
            nonlocal bad
            bad += not is_good(response, self.arguments.goodput)
            return bool(bad > most)

        run = await self.bench.run(rate, rate, count=count, stop=stop)
        trial = Trial(rate, [run], [measured(run, self.arguments)], run.interrupted)
        self.trials.append(trial)
        if run.interrupted:
            self.ended = "interrupted"
        elif why := self._why_wrong(run):
            self.ended = f"at {rate:.3g} requests/s {why}"
        elif bad > most and max(level for _, level in concurrency(run.responses, 0.0)) <= 1:
            self.ended = "even one request at a time does not keep the limits"
        self._print(trial, self.ended or ("not held" if bad > most else "held"))
        return bool(bad <= most)

    def _why_wrong(self, run: Run) -> str | None:
        """Why the share of good requests is the client's."""
        figure = percentile(100 * self.arguments.attainment)
        limits = self.arguments.goodput.items()
        late = (run.health.why_wrong(metric, figure, limit / 1e3) for metric, limit in limits)
        return run.health.why_too_busy or next(filter(None, late), None)

    def _print(self, trial: Trial, verdict: str) -> None:
        found = trial.combined
        share = "-" if found["good_share"] is None else f"{found['good_share']:.0%}"
        latencies = (found.get(f"p99_{name}_ms") for name in ("ttft", "e2el"))
        cells = ("-" if value is None else f"{value:.0f} ms" for value in latencies)
        print_row([f"{trial.rate:.3g}", len(trial.responses), share, *cells, verdict])

    def summary(self) -> str:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in self.arguments.goodput.items())
        share = f"{self.arguments.attainment:.0%} of the requests within {limits} ms"
        held = (
            "No rate kept" if self.highest is None else f"{self.highest:.3g} requests/s is the highest rate that kept"
        )
        failed = "" if self.lowest is None else f"; {self.lowest:.3g} did not"
        return f"{held} {share}{failed}" + (f" (the search ended early: {self.ended})" if self.ended else "")


async def _sweep(arguments: argparse.Namespace) -> int:
    bench = await Bench.open(arguments.url, arguments)
    sweep = Sweep(bench, arguments)
    try:
        print_row(COLUMNS)
        await sweep.search()
    finally:
        bench.close()
    print(sweep.summary())
    trials = sorted(sweep.trials, key=lambda trial: trial.rate)

    def body(detailed: bool) -> dict[str, Any]:
        runs = [
            {**trial_json(trial, arguments, detailed=detailed), "num_prompts": len(trial.responses)} for trial in trials
        ]
        return {
            "highest_rate": sweep.highest,
            "lowest_rate_not_held": sweep.lowest,
            "goodput": arguments.goodput,
            "attainment": arguments.attainment,
            "ended_early": sweep.ended,
            "runs": runs,
        }

    def html() -> str:
        named = [(f"{trial.rate:.3g} requests/s", trial) for trial in trials]
        return page(f"Rates of {bench.target.model}", named, arguments, sweep.summary())

    publish("sweep", arguments, bench, html, body)
    if sweep.ended == "interrupted":
        return INTERRUPTED
    return NOT_VALID if sweep.ended or sweep.highest is None else 0
