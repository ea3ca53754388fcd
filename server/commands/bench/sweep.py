"""`octavo bench sweep URL --goodput …`: the highest rate at which enough requests keep their limits."""

import argparse
import asyncio
import json
import math

from server.commands.serve import loop_factory

from .load_test.answer import Answer
from .load_test.driver import Run, swallow_interrupt
from .load_test.measure import is_good, peak_concurrency
from .load_test.report import document, save, trial_json, with_details
from .load_test.saturation import percentile
from .load_test.search import Bracket, highest
from .load_test.settle import settle
from .load_test.trial import Bench, Trial
from .load_test.web_report import page
from .report import print_row
from .serve import INTERRUPTED, NOT_VALID

MIN_PROMPTS = 10
COLUMNS = ("req/s", "requests", "good", "P99 TTFT", "P99 E2EL", "")


def run(config: None, arguments: argparse.Namespace) -> int:
    """1 when no rate held or the client was the bottleneck, 130 after Ctrl-C."""
    settle(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_sweep(arguments))


class Sweep:
    """The trials so far, and why the search ended before its time."""

    def __init__(self, bench: Bench, arguments: argparse.Namespace) -> None:
        self.bench = bench
        self.arguments = arguments
        self.trials: list[Trial] = []
        self.ended: str | None = None

    async def holds(self, rate: float) -> bool | None:
        """Whether enough of the requests of this rate are good; a trial ends once too many are not."""
        count = max(MIN_PROMPTS, round(rate * self.arguments.duration))
        enough: int = math.ceil(self.arguments.attainment * count - 1e-9)
        try:
            await self.bench.drain()
        except asyncio.CancelledError:
            swallow_interrupt()
            self.ended = "interrupted"
            return None
        bad, most = 0, count - enough

        def stop(answer: Answer) -> bool:
            nonlocal bad
            bad += not is_good(answer, self.arguments.goodput)
            return bool(bad > most)

        run = await self.bench.run(rate, rate, count=count, stop=stop)
        trial = Trial(rate, [run], [self.bench.measured(run)])
        self.trials.append(trial)
        kept = bad <= most
        if trial.interrupted:
            self.ended = "interrupted"
        elif why := self._why_wrong(run):
            self.ended = f"at {rate:.3g} requests/s {why}"
        elif not kept and peak_concurrency(run.answers) <= 1:
            self.ended = "even one request at a time does not keep the limits"
        self._print(trial, self.ended or ("held" if kept else "not held"))
        return None if self.ended else kept

    def _why_wrong(self, run: Run) -> str | None:
        """Why the share of good requests is the client's."""
        figure = percentile(100 * self.arguments.attainment)
        limits = self.arguments.goodput.items()
        late = (run.health.why_wrong(metric, figure, limit / 1e3) for metric, limit in limits)
        return run.health.why_too_busy or next(filter(None, late), None)

    def _print(self, trial: Trial, verdict: str) -> None:
        found = trial.combined
        cells = [f"{trial.rate:.3g}", str(len(trial.answers)), _shown(found["good_share"], 100, "%")]
        cells += [_shown(found.get(f"p99_{name}_ms"), 1, " ms") for name in ("ttft", "e2el")]
        print_row([*cells, verdict])


def _shown(value: float | None, factor: float, unit: str) -> str:
    return "-" if value is None else f"{value * factor:.0f}{unit}"


async def _sweep(arguments: argparse.Namespace) -> int:
    arguments.metric_percentiles = sorted({*arguments.metric_percentiles, 99.0})
    bench = await Bench.open(arguments.url, arguments)
    sweep = Sweep(bench, arguments)
    try:
        print_row(COLUMNS)
        found = await highest(sweep.holds, arguments.start_rate, arguments.max_rate, arguments.precision)
    finally:
        bench.close()
    print(_told(found, sweep))
    _publish(found, sweep)
    if sweep.ended == "interrupted":
        return INTERRUPTED
    return NOT_VALID if sweep.ended or found.holds is None else 0


def _told(found: Bracket, sweep: Sweep) -> str:
    limits = " ".join(f"{name}:{limit:g}" for name, limit in sweep.arguments.goodput.items())
    share = f"{sweep.arguments.attainment:.0%} of the requests within {limits} ms"
    held = "No rate kept" if found.holds is None else f"{found.holds:.3g} requests/s is the highest rate that kept"
    failed = "" if found.fails is None else f"; {found.fails:.3g} did not"
    ended = "" if sweep.ended is None else f" (the search ended early: {sweep.ended})"
    return f"{held} {share}{failed}{ended}"


def _publish(found: Bracket, sweep: Sweep) -> None:
    arguments, bench = sweep.arguments, sweep.bench
    trials = sorted(sweep.trials, key=lambda trial: trial.rate)
    bodies = [{**trial_json(trial, arguments), "num_prompts": len(trial.answers)} for trial in trials]
    body = {
        "highest_rate": found.holds,
        "lowest_rate_not_held": found.fails,
        "goodput": arguments.goodput,
        "attainment": arguments.attainment,
        "ended_early": sweep.ended,
    }
    detailed = bodies
    if arguments.save_detailed:
        detailed = [{**one, **with_details(trial)} for one, trial in zip(bodies, trials, strict=True)]
    names = [f"{trial.rate:.3g} requests/s" for trial in trials]
    told = _told(found, sweep)
    html = page(f"Rates of {bench.target.model}", list(zip(names, trials, strict=True)), arguments, told)
    save(arguments, bench.target.model, document("sweep", arguments, bench, {**body, "runs": detailed}), html)
    print(json.dumps(document("sweep", arguments, bench, {**body, "runs": bodies})))
