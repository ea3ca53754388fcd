"""`octavo bench serve URL`: load on a server of any make, from without."""

import argparse
import asyncio
import json
import math
from typing import Any

from server.commands.serve import loop_factory

from .load_test.compare import alternate, ratios, table
from .load_test.report import block, document, save, trial_json, with_details
from .load_test.settle import settle
from .load_test.trial import Bench, Trial
from .load_test.web_report import page

INTERRUPTED, NOT_VALID = 130, 1


def run(config: None, arguments: argparse.Namespace) -> int:
    """1 when no request was answered or the client was the bottleneck, 130 after Ctrl-C."""
    settle(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        trials = runner.run(_compare(arguments) if arguments.compare else _measure(arguments))
    return exit_code(trials)


def exit_code(trials: list[Trial]) -> int:
    if any(trial.interrupted for trial in trials):
        return INTERRUPTED
    failed = any(trial.is_wrong or not any(each["completed"] for each in trial.figures) for trial in trials)
    return NOT_VALID if failed else 0


async def _measure(arguments: argparse.Namespace) -> list[Trial]:
    """A trial for each rate."""
    bench = await Bench.open(arguments.url, arguments)
    try:
        print(f"{bench.target.url}{bench.target.endpoint}, model {bench.target.model}; prompts: {bench.prompts}")
        trials: list[Trial] = []
        for rate in arguments.request_rate:
            trials.append(await _repeated(bench, rate, arguments.repeats))
            print("\n".join(block(trials[-1], arguments)), flush=True)
            if trials[-1].interrupted:
                break
    finally:
        bench.close()
    _publish(arguments, bench, trials)
    return trials


async def _repeated(bench: Bench, rate: float, repeats: int) -> Trial:
    """Ctrl-C leaves out the run it ends, unless it is the only one."""
    trial = Trial(rate, [], [])
    for number in range(repeats):
        run = await bench.run(rate, f"{rate}/{number}")
        if not run.interrupted or number == 0:
            trial.runs.append(run)
            trial.figures.append(bench.measured(run))
        if run.interrupted:
            trial.runs[-1].interrupted = True
            break
    return trial


def _publish(arguments: argparse.Namespace, bench: Bench, trials: list[Trial]) -> None:
    """The files, and the document as the last line."""
    bodies = [trial_json(trial, arguments) for trial in trials]
    detailed = bodies
    if arguments.save_detailed:
        detailed = [{**body, **with_details(trial)} for body, trial in zip(bodies, trials, strict=True)]
    names = [_name(trial) for trial in trials]
    html = page(f"Load test of {bench.target.model}", list(zip(names, trials, strict=True)), arguments)
    save(arguments, bench.target.model, document("serve", arguments, bench, _body(detailed)), html)
    print(json.dumps(document("serve", arguments, bench, _body(bodies))))


def _body(trials: list[dict[str, Any]]) -> dict[str, Any]:
    return trials[0] if len(trials) == 1 else {"runs": trials}


def _name(trial: Trial) -> str:
    return f"{trial.rate:g} requests/s" if math.isfinite(trial.rate) else "all runs"


async def _compare(arguments: argparse.Namespace) -> list[Trial]:
    """A trial for each of two servers."""
    first = await Bench.open(arguments.url, arguments, "A")
    try:
        second = await Bench.open(arguments.compare, arguments, "B")
        try:
            [rate] = arguments.request_rate
            trials = await alternate([first, second], rate, arguments.repeats)
        finally:
            second.close()
    finally:
        first.close()
    named = [(name, trial) for name, trial in zip("AB", trials, strict=True) if trial.runs]
    for name, trial in named:
        print("\n".join([f"{name}:", *block(trial, arguments)]), flush=True)
    if len(named) == len(trials):
        _publish_ratios(arguments, [first, second], trials)
    return [trial for _, trial in named]


def _publish_ratios(arguments: argparse.Namespace, benches: list[Bench], trials: list[Trial]) -> None:
    found = ratios(trials, arguments)
    both = list(zip("AB", benches, trials, strict=True))
    lines = [f"{name}: {bench.target.url}, model {bench.target.model}" for name, bench, _ in both]
    lines += table(trials, found, arguments)
    print("\n".join(lines))
    servers = [
        {
            "url": bench.target.url,
            "model_id": bench.target.model,
            "prompts": bench.prompts,
            **trial_json(trial, arguments),
            **(with_details(trial) if arguments.save_detailed else {}),
        }
        for _, bench, trial in both
    ]
    report = document("serve", arguments, benches[0], {"servers": servers, "ratios": found})
    title = f"{arguments.compare} against {arguments.url}"
    html = page(title, [(name, trial) for name, _, trial in both], arguments, "\n".join(lines))
    save(arguments, benches[0].target.model, report, html)
    print(json.dumps(report))
