"""What the figures should be. Set before anything was measured: a run confirms or corrects them."""

from collections.abc import Callable, Iterable
from typing import Any

Figures = dict[str, dict[str, Any]]
"""Measurements of one section, by what was measured."""

LARGE_CACHE = 100.0
"""Megabytes of keys and values, from which on attention in decode steps is measured by the bandwidth."""


def compare(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with what was measured: reached, missed or not measured."""
    figures: dict[str, Figures] = {
        name: {event["what"]: event for event in section["events"] if event["event"] == "measurement"}
        for name, section in found.items()
    }
    rows = []
    for what, section, wanted, unit, measure in TARGETS:
        measured = measure(figures.get(section, {}))
        verdict = "not measured" if measured is None else "reached" if measured >= wanted else "missed"
        rows.append({"what": what, "wanted": wanted, "unit": unit, "measured": measured, "verdict": verdict})
    return rows


def _figure(what: str, name: str) -> Callable[[Figures], float | None]:
    return lambda figures: figures.get(what, {}).get(name)


def _best(prefix: str, name: str) -> Callable[[Figures], float | None]:
    return lambda figures: max(_values(figures, name, lambda row: row["what"].startswith(prefix)), default=None)


def _values(figures: Figures, name: str, wanted: Callable[[dict[str, Any]], bool]) -> Iterable[float]:
    return [row[name] for row in figures.values() if wanted(row) and row.get(name) is not None]


def _slowest_large_decode(figures: Figures) -> float | None:
    def is_large(row: dict[str, Any]) -> bool:
        return row["backend"] == "triton" and row["kind"] == "decode" and row["megabytes"] >= LARGE_CACHE

    return min(_values(figures, "of_bandwidth", is_large), default=None)


def _longest_prefill(figures: Figures) -> float | None:
    return figures.get("triton prefill 1 x 8192, heads 32/8/128", {}).get("teraflops")


# What, section, wanted, unit, and the figure among the section's.
TARGETS: tuple[tuple[str, str, float, str, Callable[[Figures], float | None]], ...] = (
    (
        "Llama-3.1-8B, decode, batch 1, 2k contexts",
        "model_speed",
        0.80,
        "of bandwidth",
        _figure("Llama-3.1-8B decode 1 x 2048", "of_bandwidth"),
    ),
    (
        "Llama-3.1-8B, decode, batch 64, 2k contexts",
        "model_speed",
        0.65,
        "of bandwidth",
        _figure("Llama-3.1-8B decode 64 x 2048", "of_bandwidth"),
    ),
    (
        "Llama-3.1-8B, prefill, the best batch",
        "model_speed",
        0.60,
        "of matrix rate",
        _best("Llama-3.1-8B prefill", "of_matrix_rate"),
    ),
    (
        "own attention, decode, the slowest with 100 MB of keys and values or more",
        "attention_speed",
        0.70,
        "of bandwidth",
        _slowest_large_decode,
    ),
    ("own attention, prefill of 8192 tokens, heads of 128", "attention_speed", 400.0, "TFLOP/s", _longest_prefill),
    ("nano-vllm's workload", "workload", 20000.0, "output tokens/s", _figure("nano-vllm", "output_tokens_per_second")),
)
