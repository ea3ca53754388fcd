"""`octavo bench serve URL`: load on a server of any make, from without, or on two in turn.

`octavo bench sweep URL --goodput …`: the highest rate at which enough requests keep their limits.
"""

import argparse
import asyncio
import math
from collections.abc import Sequence
from typing import Any

from configs.errors import UsageError
from server.commands.serve import loop_factory

from .flags import CHAT, COMPLETIONS, FILE
from .load import SMALL_REQUEST, Bench, read_lines
from .measure import Run, Trial, is_good, percentile, ratio
from .report import LABELS, RATES, block, latency_names, print_row, publish
from .target import Response

INTERRUPTED, NOT_VALID = 130, 1
HELD, NOT_HELD, CTRL_C = "held", "not held", "interrupted"
MIN_PROMPTS = 10
MAX_HALVINGS = 6
COLUMNS = ("req/s", "requests", "good", "P99 TTFT", "P99 E2EL", "")


def run(config: None, arguments: argparse.Namespace) -> int:
    """1 when no request was answered, no rate held, or the client was the bottleneck; 130 after Ctrl-C."""
    complete(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run((_sweep if arguments.bench == "sweep" else _serve)(arguments))


def complete(arguments: argparse.Namespace) -> None:
    """Fill in defaults that hang on other flags, and the `lines` of a file.

    Raises `UsageError` for combinations that make no sense.
    """
    path, is_multi_turn = arguments.dataset_path, arguments.dataset_name == "multi_turn"
    name = arguments.dataset_name = arguments.dataset_name or (FILE if path is not None else "random")
    arguments.lines = [] if path is None else read_lines("--dataset-path", path, arguments.output_len)
    prompts = [request.prompt for sample in arguments.lines for request in sample]
    kinds = {type(prompt[0]) for prompt in prompts if isinstance(prompt, list)}
    is_chat = is_multi_turn or dict in kinds or len(prompts) > len(arguments.lines)
    endpoint = arguments.endpoint or (CHAT if is_chat else COMPLETIONS)
    has_ramp, has_rate = arguments.ramp_up_strategy is not None, arguments.request_rate != [math.inf]
    refusals = {
        f"--dataset-name {FILE} and --dataset-path go together": (name == FILE) != (path is not None),
        "--turns is for --dataset-name multi_turn; lines of a file have turns of their own": (
            arguments.turns is not None and not is_multi_turn
        ),
        f"chats need --endpoint {CHAT}": is_chat and endpoint == COMPLETIONS,
        f"prompts of token ids need --endpoint {COMPLETIONS}": int in kinds and endpoint == CHAT,
        "--ramp-up-strategy sets the rate: it does not go with --request-rate": has_ramp and has_rate,
        "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps": (
            has_ramp and None in (arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
        ),
        "--compare takes one --request-rate": arguments.compare is not None and len(arguments.request_rate) > 1,
    }
    for text, holds in refusals.items():
        if holds:
            raise UsageError(text)
    arguments.endpoint = endpoint
    arguments.turns = (arguments.turns or 4) if is_multi_turn else 1
    if arguments.ignore_eos is None:
        arguments.ignore_eos = name != FILE
    arguments.repeats = arguments.repeats or (1 if arguments.compare is None else 3)
    arguments.goodput = dict(arguments.goodput)


async def _serve(arguments: argparse.Namespace) -> int:
    """A trial for each rate, or one for each of two servers."""
    urls = {"A": arguments.url, "B": arguments.compare} if arguments.compare else {"": arguments.url}
    benches = [Bench(url, arguments, side) for side, url in urls.items()]
    trials: list[Trial] = []
    try:
        for bench in benches:
            await bench.open()
        if not arguments.compare:
            target = benches[0].target
            print(f"{target.url}{target.endpoint}, model {target.model}; prompts: {benches[0].prompts}")
        for rate in arguments.request_rate:
            for trial in await _alternate(benches, rate, arguments):
                print(f"{trial.side}:\n" if trial.side else "", block(trial, arguments), sep="", flush=True)
                trials.append(trial)
            if trials[-1].interrupted:
                break
    finally:
        for bench in benches:
            bench.target.client.close()
    if not arguments.compare:
        title = f"Load test of {benches[0].target.model}"
        publish(arguments, benches[0], trials, lambda runs: runs[0] if len(runs) == 1 else {"runs": runs}, title)
    elif len(trials) == 2:
        _publish_ratios(benches, trials, arguments)
    if any(trial.interrupted for trial in trials):
        return INTERRUPTED
    figures = [trial.figures for trial in trials]
    return 0 if all(found["completed"] and not found["client"]["bottleneck"] for found in figures) else NOT_VALID


async def _alternate(benches: Sequence[Bench], rate: float, arguments: argparse.Namespace) -> list[Trial]:
    """A trial of `repeats` runs per server, in turn: A B, B A, A B, … so that what drifts meets both alike.

    Ctrl-C leaves out the turn that it ends, unless it is the first. A server without a run has no trial.
    """
    trials = [Trial(rate, [], bench.side) for bench in benches]
    for number in range(arguments.repeats):
        name = f"{number}" if arguments.compare else f"{rate}/{number}"
        turn = list(zip(benches, trials, strict=True))[:: -1 if number % 2 else 1]
        runs = []
        for bench, _ in turn:
            runs.append(await bench.run(rate, name, arguments.num_prompts))
            if runs[-1].interrupted:
                break
        if number == 0 or not runs[-1].interrupted:
            for (_, trial), run in zip(turn, runs, strict=False):
                trial.runs.append(run)
        if runs[-1].interrupted:
            for trial in trials:
                trial.interrupted = True
            break
    return [trial for trial in trials if trial.runs]


def _publish_ratios(benches: list[Bench], trials: list[Trial], arguments: argparse.Namespace) -> None:
    """Of each figure that both servers have in every run: B / A and its 95 % confidence interval."""
    names = {name: LABELS[name] for name in RATES if name != "request_goodput" or arguments.goodput}
    for metric in arguments.percentile_metrics:
        names |= latency_names(metric, arguments.metric_percentiles)
    lines = [f"{bench.side}: {bench.target.url}, model {bench.target.model}" for bench in benches]
    lines.append(f"{'':<36}{'A':>12}{'B':>12}{'B / A':>9}   95 % confidence")
    ratios: dict[str, dict[str, Any]] = {}
    for name, label in names.items():
        values = [trial.figures.get(name) for trial in trials]
        line = f"{label.rstrip(':'):<36}" + "".join("-".rjust(12) if x is None else f"{x:>12.2f}" for x in values)
        ours, theirs = ([run.figures.get(name) or 0.0 for run in trial.runs] for trial in trials)
        if all(ours) and all(theirs):
            value, around = ratio(ours, theirs)
            ratios[name] = {"ratio": value, "confidence_95": around}
            line += f"{value:>9.3f}" + (f"   {around[0]:.3f} to {around[1]:.3f}" if around else "")
        lines.append(line)
    text = "\n".join(lines)
    print(text)
    heads = [{"url": bench.target.url, "model_id": bench.target.model, "prompts": bench.prompts} for bench in benches]

    def body(runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"servers": [head | run for head, run in zip(heads, runs, strict=True)], "ratios": ratios}

    publish(arguments, benches[0], trials, body, f"{arguments.compare} against {arguments.url}", text)


async def _sweep(arguments: argparse.Namespace) -> int:
    """Ends when the rates are within --precision of each other, at --max-rate, or when even start / 64 fails."""
    arguments.metric_percentiles = sorted({*arguments.metric_percentiles, 99.0})
    bench = Bench(arguments.url, arguments)
    trials: list[Trial] = []
    highest: float | None = None  # that held
    lowest: float | None = None  # that did not
    ended: str | None = None  # why, before its time
    try:
        await bench.open()
        print_row(COLUMNS)
        while ended is None and (rate := _next_rate(highest, lowest, arguments)) is not None:
            verdict = await _offer(bench, rate, arguments, trials)
            if verdict == HELD:
                highest = rate
            elif verdict == NOT_HELD:
                lowest = rate
            else:
                ended = verdict
    finally:
        bench.target.client.close()
    limits = " ".join(f"{name}:{limit:g}" for name, limit in arguments.goodput.items())
    summary = "No rate kept" if highest is None else f"{highest:.3g} requests/s is the highest rate that kept"
    summary += f" {arguments.attainment:.0%} of the requests within {limits} ms"
    summary += "" if lowest is None else f"; {lowest:.3g} did not"
    summary += "" if ended is None else f" (the search ended early: {ended})"
    print(summary)

    def body(runs: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "highest_rate": highest,
            "lowest_rate_not_held": lowest,
            "goodput": arguments.goodput,
            "attainment": arguments.attainment,
            "ended_early": ended,
            "runs": [{**run, "num_prompts": run["completed"] + run["failed"]} for run in runs],
        }

    trials.sort(key=lambda trial: trial.rate)
    publish(arguments, bench, trials, body, f"Rates of {bench.target.model}", summary)
    if ended == CTRL_C:
        return INTERRUPTED
    return NOT_VALID if ended or highest is None else 0


def _next_rate(held: float | None, not_held: float | None, arguments: argparse.Namespace) -> float | None:
    """Twice the rate until one does not hold, then half the gap, on a logarithmic scale; None for no more."""
    if held is not None and not_held is not None:
        return math.sqrt(held * not_held) if not_held / held > 1 + arguments.precision else None
    if held is not None:
        return min(2 * held, arguments.max_rate) if held < arguments.max_rate else None
    if not_held is not None:
        return not_held / 2 if not_held > arguments.start_rate / 2**MAX_HALVINGS else None
    return float(min(arguments.start_rate, arguments.max_rate))


async def _offer(bench: Bench, rate: float, arguments: argparse.Namespace, trials: list[Trial]) -> str:
    """Add and print a trial, which ends once too many requests are not good. Returns `held`, `not held`, or why the
    search ends."""
    goodput, attainment = arguments.goodput, arguments.attainment
    count = max(MIN_PROMPTS, round(rate * arguments.duration))
    most = count - math.ceil(attainment * count - 1e-9)
    num_bad = 0

    def is_lost(response: Response) -> bool:
        nonlocal num_bad
        num_bad += not is_good(response, goodput)
        return bool(num_bad > most)

    drained = await bench.drive(Run(), [[SMALL_REQUEST]])  # comes after what the server may still have to do
    if drained.interrupted:
        return CTRL_C
    run = await bench.run(rate, rate, count, is_lost)
    trials.append(Trial(rate, [run], interrupted=run.interrupted))
    # the share of good requests may be the client's
    late = (run.health.why_wrong(name, percentile(100 * attainment), ms / 1e3) for name, ms in goodput.items())
    if run.interrupted:
        verdict = CTRL_C
    elif why := run.health.why_too_busy or next(filter(None, late), None):
        verdict = f"at {rate:.3g} requests/s {why}"
    elif num_bad > most and run.figures["peak_concurrent_requests"] <= 1:
        verdict = "even one request at a time does not keep the limits"
    else:
        verdict = NOT_HELD if num_bad > most else HELD
    share = "-" if run.figures["good_share"] is None else f"{run.figures['good_share']:.0%}"
    values = (run.figures.get(f"p99_{name}_ms") for name in ("ttft", "e2el"))
    latencies = ("-" if value is None else f"{value:.0f} ms" for value in values)
    print_row([f"{rate:.3g}", len(run.responses), share, *latencies, verdict])
    return verdict
