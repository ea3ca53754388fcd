"""Types of flags' values. All raise `ArgumentTypeError`, whose text becomes the one line of a refusal."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from .names import METRICS, OBJECTIVES


def number(low: float, *, above: bool = False, high: float = math.inf) -> Callable[[str], float]:
    """Finite numbers of at least `low`, or above it, and at most `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low < value if above else low <= value) or value > high or math.isinf(value):
            bound = f"above {low:g}" if above else f"of at least {low:g}"
            most = "" if math.isinf(high) else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"not a number {bound}{most}: {text!r}")
        return value

    return parse


def integer(text: str) -> int:
    """At least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"not an integer of at least 0: {text!r}")
    return int(text)


def rate(text: str) -> float:
    """A number above 0, or inf."""
    return math.inf if text == "inf" else number(0, above=True)(text)


def rates(text: str) -> list[float]:
    return [rate(part) for part in text.split(",")]


def pair(text: str) -> tuple[str, str]:
    """KEY=VALUE"""
    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise argparse.ArgumentTypeError(f"not KEY=VALUE: {text!r}")
    return key.strip(), value.strip()


def header(text: str) -> tuple[str, str]:
    """KEY=VALUE that fits a line of HTTP."""
    key, value = pair(text)
    if not (key + value).isascii() or not (key + value).isprintable():
        raise argparse.ArgumentTypeError(f"not a header: {text!r}")
    return key, value


def objective(text: str) -> tuple[str, float]:
    """NAME:MILLISECONDS"""
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES:
        raise argparse.ArgumentTypeError(f"not one of {', '.join(OBJECTIVES)} and its limit, as ttft:200: {text!r}")
    return name, number(0)(limit)


def metrics(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"not one of {', '.join(METRICS)}: {unknown[0]!r}")
    return names


def percentiles(text: str) -> list[float]:
    return [number(0, high=100)(part) for part in text.split(",")]


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text!r}")
    return value
