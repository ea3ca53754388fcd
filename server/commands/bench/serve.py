"""`octavo bench serve URL`: load on a server of any make, from without, or on two in turn."""

import argparse
import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import UsageError
from server.commands.serve import loop_factory

from .datasets import Sample, read_lines
from .flags import CHAT, COMPLETIONS, FILE
from .load import Bench, Run
from .measure import Trial, figures, ratio
from .report import block, latency_names, publish, trial_json
from .web_report import page

INTERRUPTED, NOT_VALID = 130, 1
RATE_NAMES = {
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output throughput (tok/s)",
    "total_token_throughput": "Total throughput (tok/s)",
}


def run(config: None, arguments: argparse.Namespace) -> int:
    """1 when no request was answered or the client was the bottleneck, 130 after Ctrl-C."""
    complete(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        trials = runner.run(_compare(arguments) if arguments.compare else _measure(arguments))
    if any(trial.interrupted for trial in trials):
        return INTERRUPTED
    found = [each for trial in trials for each in trial.figures]
    failed = any(each["client"]["bottleneck"] for each in found)
    return NOT_VALID if failed or not all(any(each["completed"] for each in trial.figures) for trial in trials) else 0


def complete(arguments: argparse.Namespace) -> None:
    """Fill in defaults that hang on other flags, and the `lines` of a file. Raises `UsageError` for combinations that
    make no sense."""
    name = arguments.dataset_name = arguments.dataset_name or (FILE if arguments.dataset_path else "random")
    if (name == FILE) != (arguments.dataset_path is not None):
        raise UsageError(f"--dataset-name {FILE} and --dataset-path go together")
    if arguments.turns is not None and name != "multi_turn":
        raise UsageError("--turns is for --dataset-name multi_turn; lines of a file have turns of their own")
    arguments.turns = (arguments.turns or 4) if name == "multi_turn" else 1
    lines: list[Sample] = []
    if name == FILE:
        lines = read_lines("--dataset-path", arguments.dataset_path, arguments.output_len)
    arguments.lines = lines
    if arguments.ignore_eos is None:
        arguments.ignore_eos = name != FILE
    prompts = [request.prompt for sample in lines for request in sample]
    is_chat = name == "multi_turn" or any(len(sample) > 1 for sample in lines) or _has(dict, prompts)
    if is_chat and arguments.endpoint == COMPLETIONS:
        raise UsageError(f"chats need --endpoint {CHAT}")
    arguments.endpoint = arguments.endpoint or (CHAT if is_chat else COMPLETIONS)
    if arguments.endpoint == CHAT and _has(int, prompts):
        raise UsageError(f"prompts of token ids need --endpoint {COMPLETIONS}")
    if arguments.ramp_up_strategy is not None:
        if arguments.request_rate != [math.inf]:
            raise UsageError("--ramp-up-strategy sets the rate: it does not go with --request-rate")
        if arguments.ramp_up_start_rps is None or arguments.ramp_up_end_rps is None:
            raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if arguments.compare is not None and len(arguments.request_rate) > 1:
        raise UsageError("--compare takes one --request-rate")
    if arguments.repeats is None:
        arguments.repeats = 3 if arguments.compare is not None else 1
    arguments.goodput = dict(arguments.goodput)


def _has(kind: type, prompts: Sequence[Any]) -> bool:
    """Whether some prompt is a list of that kind: of messages or token ids."""
    return any(isinstance(prompt, list) and isinstance(prompt[0], kind) for prompt in prompts)


def measured(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    return figures(run, arguments.goodput, arguments.metric_percentiles, arguments.percentile_metrics)


async def _measure(arguments: argparse.Namespace) -> list[Trial]:
    """A trial for each rate."""
    bench = await Bench.open(arguments.url, arguments)
    try:
        print(f"{bench.target.url}{bench.target.endpoint}, model {bench.target.model}; prompts: {bench.prompts}")
        trials: list[Trial] = []
        for rate in arguments.request_rate:
            [trial] = await _alternate([bench], rate, arguments, f"{rate}/")
            trials.append(trial)
            print(block(trial, arguments), flush=True)
            if trial.interrupted:
                break
    finally:
        await bench.close()

    def body(detailed: bool) -> dict[str, Any]:
        bodies = [trial_json(trial, arguments, detailed=detailed) for trial in trials]
        return bodies[0] if len(bodies) == 1 else {"runs": bodies}

    named = [(f"{t.rate:g} requests/s" if math.isfinite(t.rate) else "all runs", t) for t in trials]
    publish("serve", arguments, bench, lambda: page(f"Load test of {bench.target.model}", named, arguments), body)
    return trials


async def _alternate(
    benches: Sequence[Bench], rate: float, arguments: argparse.Namespace, prefix: str = ""
) -> list[Trial]:
    """A trial of `repeats` runs per server, in turn: A B, B A, A B, … so that what drifts meets both alike.

    Ctrl-C leaves out the turn that it ends, unless it is the first.
    """
    trials = [Trial(rate) for _ in benches]
    for number in range(arguments.repeats):
        turn: list[tuple[Trial, Run]] = []
        for bench, trial in list(zip(benches, trials, strict=True))[:: -1 if number % 2 else 1]:
            turn.append((trial, await bench.run(rate, f"{prefix}{number}")))
            if turn[-1][1].interrupted:
                break
        interrupted = turn[-1][1].interrupted
        if number == 0 or not interrupted:
            for trial, run in turn:
                trial.runs.append(run)
                trial.figures.append(measured(run, arguments))
        if interrupted:
            trials[0].runs[-1].interrupted = True
            break
    return trials


async def _compare(arguments: argparse.Namespace) -> list[Trial]:
    """A trial for each of two servers, and the ratios of their figures."""
    benches: list[Bench] = []
    try:
        for url, side in ((arguments.url, "A"), (arguments.compare, "B")):
            benches.append(await Bench.open(url, arguments, side))
        [rate] = arguments.request_rate
        trials = await _alternate(benches, rate, arguments)
    finally:
        for bench in benches:
            await bench.close()
    named = [(side, trial) for side, trial in zip("AB", trials, strict=True) if trial.runs]
    for side, trial in named:
        print(f"{side}:\n{block(trial, arguments)}", flush=True)
    if len(named) < len(trials):
        return [trial for _, trial in named]
    ratios = _ratios(trials, arguments)
    heads = [f"{side}: {b.target.url}, model {b.target.model}" for side, b in zip("AB", benches, strict=True)]
    text = "\n".join([*heads, *_table(trials, ratios, arguments)])
    print(text)

    def body(detailed: bool) -> dict[str, Any]:
        servers = [
            {
                "url": bench.target.url,
                "model_id": bench.target.model,
                "prompts": bench.prompts,
                **trial_json(trial, arguments, detailed=detailed),
            }
            for bench, trial in zip(benches, trials, strict=True)
        ]
        return {"servers": servers, "ratios": ratios}

    title = f"{arguments.compare} against {arguments.url}"
    publish("serve", arguments, benches[0], lambda: page(title, named, arguments, text), body)
    return trials


def _compared(arguments: argparse.Namespace) -> dict[str, str]:
    """The figures that are compared, and how they are called."""
    names = {name: label for name, label in RATE_NAMES.items() if name != "request_goodput" or arguments.goodput}
    for metric in arguments.percentile_metrics:
        names |= latency_names(metric, arguments.metric_percentiles)
    return names


def _ratios(trials: Sequence[Trial], arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each figure that both servers have in every run: B / A and its 95 % confidence interval."""
    found = {}
    for name in _compared(arguments):
        ours, theirs = ([each.get(name) for each in trial.figures] for trial in trials)
        if all(ours) and all(theirs):
            value, around = ratio([each for each in ours if each], [each for each in theirs if each])
            found[name] = {"ratio": value, "confidence_95": around}
    return found


def _table(
    trials: Sequence[Trial], ratios: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace
) -> list[str]:
    lines = [_row("", "A", "B", "B / A", "   95 % confidence")]
    combined = [trial.combined for trial in trials]
    for name, label in _compared(arguments).items():
        cells = ["-" if each.get(name) is None else f"{each[name]:.2f}" for each in combined]
        found = ratios.get(name, {"ratio": None, "confidence_95": None})
        around = found["confidence_95"]
        cells.append("-" if found["ratio"] is None else f"{found['ratio']:.3f}")
        cells.append(f"   {around[0]:.3f} to {around[1]:.3f}" if around else "")
        lines.append(_row(label, *cells))
    return lines


def _row(label: str, *cells: str) -> str:
    a, b, quotient, interval = cells
    return f"{label:<34}{a:>12}{b:>12}{quotient:>9}{interval}"
