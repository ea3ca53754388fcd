"""`octavo bench serve URL`: load on a server of any make, from without, or on two in turn."""

import argparse
import asyncio
import math
from collections.abc import Sequence
from typing import Any

from configs.errors import UsageError
from server.commands.serve import loop_factory

from .datasets import read_lines
from .flags import CHAT, COMPLETIONS, FILE
from .load import Bench
from .measure import Trial, measured, ratio
from .report import LABELS, RATES, block, latency_names, publish, trial_json
from .web_report import page

INTERRUPTED, NOT_VALID = 130, 1


def run(config: None, arguments: argparse.Namespace) -> int:
    """1 when no request was answered or the client was the bottleneck, 130 after Ctrl-C."""
    complete(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        trials = runner.run(_measure(arguments))
    if any(trial.interrupted for trial in trials):
        return INTERRUPTED
    is_valid = all(trial.combined["completed"] and not trial.combined["client"]["bottleneck"] for trial in trials)
    return 0 if is_valid else NOT_VALID


def complete(arguments: argparse.Namespace) -> None:
    """Fill in defaults that hang on other flags, and the `lines` of a file.

    Raises `UsageError` for combinations that make no sense.
    """
    name = arguments.dataset_name = arguments.dataset_name or (FILE if arguments.dataset_path else "random")
    if (name == FILE) != (arguments.dataset_path is not None):
        raise UsageError(f"--dataset-name {FILE} and --dataset-path go together")
    if arguments.turns is not None and name != "multi_turn":
        raise UsageError("--turns is for --dataset-name multi_turn; lines of a file have turns of their own")
    arguments.turns = (arguments.turns or 4) if name == "multi_turn" else 1
    path = arguments.dataset_path
    arguments.lines = read_lines("--dataset-path", path, arguments.output_len) if name == FILE else []
    if arguments.ignore_eos is None:
        arguments.ignore_eos = name != FILE
    prompts = [request.prompt for sample in arguments.lines for request in sample]
    kinds = {type(prompt[0]) for prompt in prompts if isinstance(prompt, list)}
    is_chat = name == "multi_turn" or dict in kinds or len(prompts) > len(arguments.lines)
    if is_chat and arguments.endpoint == COMPLETIONS:
        raise UsageError(f"chats need --endpoint {CHAT}")
    arguments.endpoint = arguments.endpoint or (CHAT if is_chat else COMPLETIONS)
    if arguments.endpoint == CHAT and int in kinds:
        raise UsageError(f"prompts of token ids need --endpoint {COMPLETIONS}")
    if arguments.ramp_up_strategy is not None:
        if arguments.request_rate != [math.inf]:
            raise UsageError("--ramp-up-strategy sets the rate: it does not go with --request-rate")
        if arguments.ramp_up_start_rps is None or arguments.ramp_up_end_rps is None:
            raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if arguments.compare is not None and len(arguments.request_rate) > 1:
        raise UsageError("--compare takes one --request-rate")
    arguments.repeats = arguments.repeats or (1 if arguments.compare is None else 3)
    arguments.goodput = dict(arguments.goodput)


async def _measure(arguments: argparse.Namespace) -> list[Trial]:
    """A trial for each rate, or one for each of two servers."""
    urls = {"A": arguments.url, "B": arguments.compare} if arguments.compare else {"": arguments.url}
    benches: list[Bench] = []
    trials: list[Trial] = []
    try:
        for side, url in urls.items():
            benches.append(await Bench.open(url, arguments, side))
        if not arguments.compare:
            target = benches[0].target
            print(f"{target.url}{target.endpoint}, model {target.model}; prompts: {benches[0].prompts}")
        for rate in arguments.request_rate:
            turn = await _alternate(benches, rate, arguments, "" if arguments.compare else f"{rate}/")
            for side, trial in zip(urls, turn, strict=True):
                if trial.runs:
                    print(f"{side}:\n" if side else "", block(trial, arguments), sep="", flush=True)
                    trials.append(trial)
            if trials[-1].interrupted:
                break
    finally:
        for bench in benches:
            bench.close()
    if not arguments.compare:
        _publish(benches[0], trials, arguments)
    elif len(trials) == 2:
        _publish_ratios(benches, trials, arguments)
    return trials


async def _alternate(benches: Sequence[Bench], rate: float, arguments: argparse.Namespace, prefix: str) -> list[Trial]:
    """A trial of `repeats` runs per server, in turn: A B, B A, A B, … so that what drifts meets both alike.

    Ctrl-C leaves out the turn that it ends, unless it is the first.
    """
    trials = [Trial(rate) for _ in benches]
    for number in range(arguments.repeats):
        turn = []
        for bench, trial in list(zip(benches, trials, strict=True))[:: -1 if number % 2 else 1]:
            run = await bench.run(rate, f"{prefix}{number}")
            turn.append((trial, run))
            if run.interrupted:
                break
        if number == 0 or not run.interrupted:
            for trial, done in turn:
                trial.runs.append(done)
                trial.figures.append(measured(done, arguments))
        if run.interrupted:
            for trial in trials:
                trial.interrupted = True
            break
    return trials


def _publish(bench: Bench, trials: list[Trial], arguments: argparse.Namespace) -> None:
    def body(detailed: bool) -> dict[str, Any]:
        bodies = [trial_json(trial, arguments, detailed=detailed) for trial in trials]
        return bodies[0] if len(bodies) == 1 else {"runs": bodies}

    named = [(f"{t.rate:g} requests/s" if math.isfinite(t.rate) else "all runs", t) for t in trials]
    publish("serve", arguments, bench, lambda: page(f"Load test of {bench.target.model}", named, arguments), body)


def _publish_ratios(benches: list[Bench], trials: list[Trial], arguments: argparse.Namespace) -> None:
    """Of each figure that both servers have in every run: B / A and its 95 % confidence interval."""
    names = {name: LABELS[name] for name in RATES if name != "request_goodput" or arguments.goodput}
    for metric in arguments.percentile_metrics:
        names |= latency_names(metric, arguments.metric_percentiles)
    lines = [
        f"{side}: {bench.target.url}, model {bench.target.model}" for side, bench in zip("AB", benches, strict=True)
    ]
    lines.append(f"{'':<36}{'A':>12}{'B':>12}{'B / A':>9}   95 % confidence")
    ratios: dict[str, dict[str, Any]] = {}
    for name, label in names.items():
        line = label.rstrip(":").ljust(36)
        for trial in trials:
            value = trial.combined.get(name)
            line += f"{'-' if value is None else format(value, '.2f'):>12}"
        ours, theirs = ([each.get(name) or 0.0 for each in trial.figures] for trial in trials)
        if all(ours) and all(theirs):
            value, around = ratio(ours, theirs)
            ratios[name] = {"ratio": value, "confidence_95": around}
            line += f"{value:>9.3f}" + (f"   {around[0]:.3f} to {around[1]:.3f}" if around else "")
        lines.append(line)
    text = "\n".join(lines)
    print(text)

    def body(detailed: bool) -> dict[str, Any]:
        servers = []
        for bench, trial in zip(benches, trials, strict=True):
            head = {"url": bench.target.url, "model_id": bench.target.model, "prompts": bench.prompts}
            servers.append(head | trial_json(trial, arguments, detailed=detailed))
        return {"servers": servers, "ratios": ratios}

    title = f"{arguments.compare} against {arguments.url}"
    named = list(zip("AB", trials, strict=True))
    publish("serve", arguments, benches[0], lambda: page(title, named, arguments, text), body)
