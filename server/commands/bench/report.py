"""What the benchmarks print and save: tables, vLLM's block of figures, and one JSON document as the last line."""

import argparse
import json
import math
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import UsageError
from configs.settings import EngineConfig
from engine.machine import free_memory, usable_cores
from server import version

from .flags import METRICS
from .load import Bench
from .measure import Trial, kinds, whole
from .web_report import page

WIDTH, LABEL_WIDTH = 50, 40
MAX_ERRORS = 5
NOT_SAVED = ("api_key", "header", "extra_body", "lines", "bench", "command")
"""Arguments that stay out of the document: keys, what is long, and which command it was."""

LABELS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_cached_tokens": "Cached input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "peak_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
PROBES = {
    "probe_completed": "Probe requests completed:",
    "probe_failed": "Probe requests failed:",
    "probe_median_e2el_ms": "Median probe E2EL (ms):",
    "probe_p99_e2el_ms": "P99 probe E2EL (ms):",
    "probe_max_e2el_ms": "Max probe E2EL (ms):",
}
CLIENT = {
    "Client share of one core:": ("cpu_share", "{:.0%}"),
    "P99 client event loop lag (ms):": ("p99_loop_lag_ms", "{:.2f}"),
    "P99 late sends (ms):": ("p99_late_send_ms", "{:.2f}"),
}


def print_report(benchmark: str, config: EngineConfig, body: Mapping[str, Any]) -> None:
    """The last line of a benchmark of a model: the figures, and what they were measured on."""
    document = {"benchmark": benchmark, "model": config.model, **body, **_machine(torch=metadata.version("torch"))}
    print(json.dumps({**document, "settings": msgspec.to_builtins(config)}))


def print_row(cells: Sequence[object]) -> None:
    """A row of a table whose rows come one by one."""
    print("".join(f"{cell:>12}" for cell in cells), flush=True)


def _machine(**versions: str) -> dict[str, Any]:
    info = Path("/proc/cpuinfo")  # Linux's; elsewhere the platform's name for the processor does
    names = re.findall(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    return {
        "hardware": {
            "processor": names[0] if names else platform.processor() or "unknown",
            "machine": platform.machine(),
            "usable_cores": usable_cores(),
            "free_memory_gib": round(free_memory() / 2**30, 1),
            "system": platform.platform(),
        },
        "versions": {"octavo": version(), "python": platform.python_version(), **versions},
    }


def block(trial: Trial, arguments: argparse.Namespace) -> str:
    """vLLM's block of figures. Where runs were repeated, ± is half of the 95 % confidence interval."""
    found = trial.figures
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    if arguments.max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", arguments.max_concurrency))
    if math.isfinite(trial.rate):
        lines.append(_line("Request rate configured (RPS):", f"{trial.rate:.2f}"))
    optional = {"total_cached_tokens": found["total_cached_tokens"], "request_goodput": arguments.goodput}
    lines += _figures(found, {name: label for name, label in LABELS.items() if optional.get(name, True)})
    for metric in arguments.percentile_metrics:
        lines.append(METRICS[metric][1].center(WIDTH, "-"))
        lines += _figures(found, latency_names(metric, arguments.metric_percentiles))
    if "probe_completed" in found:
        lines += ["Probe Requests".center(WIDTH, "-"), *_figures(found, PROBES)]
    client = found["client"]
    lines.append("Client".center(WIDTH, "-"))
    lines += [_line(label, form.format(client[name])) for label, (name, form) in CLIENT.items()]
    for why in dict.fromkeys(client["reasons"].values()):
        names = (name for name, reason in client["reasons"].items() if reason == why)
        lines.append(f"THE CLIENT WAS THE BOTTLENECK: {why}: {', '.join(names)}")
    errors = [f"{count} x {text}" for text, count in trial.error_counts.items()]
    lines += _notes(trial) + errors[:MAX_ERRORS]
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} more kinds of errors")
    return "\n".join([*lines, "=" * WIDTH])


def latency_names(metric: str, percentiles: Sequence[float]) -> dict[str, str]:
    """The figures of a metric, and how they are called."""
    short = METRICS[metric][0]
    return {name: f"{name.split('_')[0].capitalize()} {short} (ms):" for name in kinds(metric, percentiles)}


def _line(label: str, value: object) -> str:
    return f"{label:<{LABEL_WIDTH}} {value}"


def _figures(found: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    lines = []
    for name, label in labels.items():
        value = found[name]
        text = f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)
        if name in found["client"]["reasons"]:
            text = "not valid: the client was the bottleneck"
        if around := found.get("confidence_95", {}).get(name):
            text += f" ± {(around[1] - around[0]) / 2:.2f}"
        lines.append(_line(label, text))
    return lines


def _notes(trial: Trial) -> list[str]:
    """What a reader of the figures must know."""
    uncounted = sum(not response.has_usage for response in whole(trial.responses))
    notes = {
        f"{uncounted} answers had no usage: their events were counted as tokens, their input as 0": uncounted,
        "ended early: the limits could not be kept any more": any(run.stopped for run in trial.runs),
        "interrupted: requests that were under way are left out": trial.interrupted,
    }
    return [note for note, holds in notes.items() if holds]


def _plain(value: Any) -> Any:
    """The value of a flag, or of several, for JSON, which knows no infinity."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if value == math.inf or isinstance(value, tuple) else value


def _trial_json(trial: Trial, arguments: argparse.Namespace) -> dict[str, Any]:
    """How the load was offered, and the figures."""
    ramp = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps") if arguments.ramp_up_strategy else ()
    load = {name: _plain(getattr(arguments, name)) for name in ("num_prompts", "burstiness", "max_concurrency", *ramp)}
    found = {**load, "request_rate": _plain(trial.rate), **trial.figures}
    found |= {"interrupted": trial.interrupted, "notes": _notes(trial)}
    return found | ({"error_counts": trial.error_counts} if trial.error_counts else {})


def publish(
    arguments: argparse.Namespace,
    bench: Bench,
    trials: Sequence[Trial],
    body: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
    title: str,
    text: str = "",
) -> None:
    """Save the document and the page with plots where they were asked for, and print the document as the last line.

    `body` makes its part of the document from what is said of each trial; `title` and `text` head the page. Raises
    `UsageError` when a file cannot be written.
    """
    head = {
        "benchmark": arguments.bench,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if "chat" in bench.target.endpoint else "openai",
        "label": arguments.label,
        "model_id": bench.target.model,
        "prompts": bench.prompts,
        **dict(arguments.metadata),
    }
    settings = {name: _plain(value) for name, value in vars(arguments).items() if name not in NOT_SAVED}

    def document(*, is_detailed: bool) -> str:
        runs = [_trial_json(trial, arguments) | (trial.details if is_detailed else {}) for trial in trials]
        return json.dumps({**head, **body(runs), **_machine(), "settings": settings})

    path = _result_path(arguments, bench.target.model)
    files = {path: document(is_detailed=arguments.save_detailed)} if arguments.save_result else {}
    pages = [path.with_suffix(".html")] if arguments.plot_timeline else []
    pages += [Path(arguments.html)] if arguments.html else []
    if pages:
        blocks = [block(trial, arguments) for trial in trials]
        files |= dict.fromkeys(pages, page(title, text, trials, blocks, arguments.goodput))
    for file, content in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}") from error
        print(f"Written: {file}")
    print(document(is_detailed=False))


def _result_path(arguments: argparse.Namespace, model: str) -> Path:
    if arguments.result_filename:
        return Path(arguments.result_dir, arguments.result_filename)
    rate = ",".join(f"{rate:g}" for rate in arguments.request_rate)
    if arguments.ramp_up_strategy is not None:
        rate = f"ramp-up-{arguments.ramp_up_strategy}-{arguments.ramp_up_start_rps:g}-{arguments.ramp_up_end_rps:g}"
    limit = f"-concurrency{arguments.max_concurrency}" if arguments.max_concurrency is not None else ""
    name = f"{arguments.label}-{rate}qps{limit}-{model.rsplit('/', 1)[-1]}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return Path(arguments.result_dir, name)
