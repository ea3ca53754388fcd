"""What a load test prints and saves: vLLM's block of figures, and one JSON document under its names."""

import argparse
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import UsageError
from server.commands.bench.report import hardware
from server.version import version

from .measure import details, errors_of, percentile_name
from .names import METRICS
from .trial import Bench, Trial

WIDTH, LABEL_WIDTH = 50, 40
MAX_ERRORS = 5
SECRETS = ("api_key", "header", "extra_body", "lines")
"""Flags that stay out of the document: keys, and what is long."""

WRONG = "not valid: the client was the bottleneck"

COUNTS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_cached_tokens": "Cached input tokens:",
    "total_output_tokens": "Total generated tokens:",
}
RATES = {
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "peak_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}
PROBES = {
    "probe_completed": "Probe requests completed:",
    "probe_failed": "Probe requests failed:",
    "probe_median_e2el_ms": "Median probe E2EL (ms):",
    "probe_p99_e2el_ms": "P99 probe E2EL (ms):",
    "probe_max_e2el_ms": "Max probe E2EL (ms):",
}


def block(trial: Trial, arguments: argparse.Namespace) -> list[str]:
    """The lines. Where runs were repeated, ± is half of the 95 % confidence interval."""
    found = trial.combined
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += _lines(found, {name: label for name, label in COUNTS.items() if "cached" not in name or found[name]})
    if arguments.max_concurrency is not None:
        lines.append(f"{'Maximum request concurrency:':<{LABEL_WIDTH}} {arguments.max_concurrency}")
    if math.isfinite(trial.rate):
        lines.append(f"{'Request rate configured (RPS):':<{LABEL_WIDTH}} {trial.rate:.2f}")
    rates = {name: label for name, label in RATES.items() if name != "request_goodput" or arguments.goodput}
    lines += _lines(found, rates)
    for metric in arguments.percentile_metrics:
        short, title = METRICS[metric]
        lines.append(title.center(WIDTH, "-"))
        lines += _lines(found, latency_names(metric, short, arguments.metric_percentiles))
    if "probe_completed" in found:
        lines += ["Probe Requests".center(WIDTH, "-"), *_lines(found, PROBES)]
    return [*lines, *_client_lines(found["client"]), *_notes(trial, arguments), "=" * WIDTH]


def latency_names(metric: str, short: str, percentiles: Sequence[float]) -> dict[str, str]:
    """Figures of a metric, and how they are called."""
    names = {f"mean_{metric}_ms": f"Mean {short} (ms):", f"median_{metric}_ms": f"Median {short} (ms):"}
    return names | {percentile_name(p, metric): f"P{p:g} {short} (ms):" for p in percentiles}


def _lines(found: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    lines = []
    for name, label in labels.items():
        value = found[name]
        text = f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)
        if name in found["client"]["reasons"]:
            text = WRONG
        if around := found.get("confidence_95", {}).get(name):
            text += f" ± {(around[1] - around[0]) / 2:.2f}"
        lines.append(f"{label:<{LABEL_WIDTH}} {text}")
    return lines


def _client_lines(client: Mapping[str, Any]) -> list[str]:
    lines = [
        "Client".center(WIDTH, "-"),
        f"{'Client share of one core:':<{LABEL_WIDTH}} {client['cpu_share']:.0%}",
        f"{'P99 client event loop lag (ms):':<{LABEL_WIDTH}} {client['p99_loop_lag_ms']:.2f}",
        f"{'P99 late sends (ms):':<{LABEL_WIDTH}} {client['p99_late_send_ms']:.2f}",
    ]
    by_reason: dict[str, list[str]] = {}
    for name, why in client["reasons"].items():
        by_reason.setdefault(why, []).append(name)
    return lines + [f"THE CLIENT WAS THE BOTTLENECK: {why}: {', '.join(names)}" for why, names in by_reason.items()]


def _notes(trial: Trial, arguments: argparse.Namespace) -> list[str]:
    notes = notes_of(trial)
    errors = errors_of(trial.answers)
    notes += [f"{count} x {text}" for text, count in list(errors.items())[:MAX_ERRORS]]
    if len(errors) > MAX_ERRORS:
        notes.append(f"and {len(errors) - MAX_ERRORS} more kinds of errors")
    return notes


def notes_of(trial: Trial) -> list[str]:
    """What a reader of the figures must know."""
    notes = []
    whole = [answer for answer in trial.answers if answer.error is None]
    if uncounted := sum(not answer.has_usage for answer in whole):
        notes.append(f"{uncounted} answers had no usage: their events were counted as tokens, their input as 0")
    if any(run.stopped for run in trial.runs):
        notes.append("ended early: the limits could not be kept any more")
    if trial.interrupted:
        notes.append("interrupted: requests that were under way are left out")
    return notes


def document(benchmark: str, arguments: argparse.Namespace, bench: Bench, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document."""
    settings = {
        name: _plain(value)
        for name, value in vars(arguments).items()
        if name not in (*SECRETS, "bench", "command", "module")
    }
    return {
        "benchmark": benchmark,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if "chat" in bench.target.endpoint else "openai",
        "label": arguments.label,
        "model_id": bench.target.model,
        "prompts": bench.prompts,
        **dict(arguments.metadata),
        **body,
        "hardware": hardware(),
        "versions": {"octavo": version(), "python": platform.python_version()},
        "settings": settings,
    }


def trial_json(trial: Trial, arguments: argparse.Namespace) -> dict[str, Any]:
    """How the load was offered, and the figures."""
    load: dict[str, Any] = {
        "num_prompts": arguments.num_prompts,
        "request_rate": trial.rate if math.isfinite(trial.rate) else "inf",
        "burstiness": _plain(arguments.burstiness),
        "max_concurrency": arguments.max_concurrency,
    }
    if arguments.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        load |= {name: getattr(arguments, name) for name in names}
    found = {**load, **trial.combined, "interrupted": trial.interrupted, "notes": notes_of(trial)}
    errors = errors_of(trial.answers)
    return {**found, "error_counts": errors} if errors else found


def with_details(trial: Trial) -> dict[str, Any]:
    """The requests of all runs, in their order."""
    merged: dict[str, list[Any]] = {}
    for run in trial.runs:
        for name, values in details(run).items():
            merged.setdefault(name, []).extend(values)
    return merged


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str, dict)) else str(value)


def result_path(arguments: argparse.Namespace, model: str) -> Path:
    """Where `--save-result` writes."""
    if arguments.result_filename:
        return Path(arguments.result_dir, arguments.result_filename)
    rate = ",".join(f"{rate:g}" for rate in arguments.request_rate)
    if arguments.ramp_up_strategy is not None:
        rate = f"ramp-up-{arguments.ramp_up_strategy}-{arguments.ramp_up_start_rps:g}-{arguments.ramp_up_end_rps:g}"
    limit = f"-concurrency{arguments.max_concurrency}" if arguments.max_concurrency is not None else ""
    name = f"{arguments.label}-{rate}qps{limit}-{model.rsplit('/', 1)[-1]}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return Path(arguments.result_dir, name)


def save(arguments: argparse.Namespace, model: str, saved: Mapping[str, Any], page: str) -> None:
    """The document and the page with plots, where they were asked for. Raises `UsageError` when a file cannot be."""
    path = result_path(arguments, model)
    files = {path: json.dumps(saved)} if arguments.save_result else {}
    if arguments.plot_timeline:
        files[path.with_suffix(".html")] = page
    if arguments.html:
        files[Path(arguments.html)] = page
    for file, text in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {file}: {error.strerror}") from error
        print(f"Written: {file}")
