"""Flags of the benchmarks. A length is a number, or LOW-HIGH for lengths drawn evenly from that range."""

import argparse
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from server.flags import Parser

from .load_test.flags import add_serve_flags, add_sweep_flags

CLIENTS = ("bench serve", "bench sweep")
"""Commands for servers that run elsewhere: no model here, and no settings."""

NO_INTEGER = "not an integer of at least 1: {!r}"


class Lengths(NamedTuple):
    """Tokens, both ends included."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


def count(text: str) -> int:
    """An integer of at least 1; raises `ArgumentTypeError`, as all types here do."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(NO_INTEGER.format(text))
    return int(text)


def milliseconds(text: str) -> int:
    """An integer of at least 0."""
    return 0 if text == "0" else count(text)


def lengths(text: str) -> Lengths:
    """N or LOW-HIGH."""
    low, dash, high = text.partition("-")
    found = Lengths(count(low), count(high if dash else low))
    if found.low > found.high:
        raise argparse.ArgumentTypeError(f"the range {text} ends before it begins")
    return found


def counts(text: str) -> list[int]:
    """N,N,…"""
    return [count(part) for part in text.split(",")]


def add_benchmarks(bench: Parser) -> dict[str, Parser]:
    """The parsers of the benchmarks, by name."""
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    helps: dict[str, tuple[str, Callable[[Parser], None]]] = {
        "throughput": ("tokens per second of many prompts, without HTTP", _add_throughput_flags),
        "latency": ("time to first token and per token, by batch size and context", _add_latency_flags),
        "streaming": ("processor time of the API process per streamed token, without a model", _add_streaming_flags),
        "kernels": ("each C++ kernel against what the machine can do", _add_kernel_flags),
        "quality": ("what the weights' type costs against float32", _add_quality_flags),
        "serve": ("load on a server of any make, over HTTP", partial(add_serve_flags, count=count, lengths=lengths)),
        "sweep": ("the highest rate at which it keeps limits", partial(add_sweep_flags, count=count, lengths=lengths)),
    }
    parsers = {}
    for name, (text, add_flags) in helps.items():
        parsers[name] = kinds.add_parser(name, help=text)
        add_flags(parsers[name])
    return parsers


def _add(parser: Parser, flag: str, kind: Callable[[str], Any], metavar: str, default: Any, text: str) -> None:
    shown = ",".join(map(str, default)) if isinstance(default, list) else str(default)
    parser.add_argument(flag, type=kind, metavar=metavar, default=default, help=f"{text} (default: {shown})")


def _add_throughput_flags(parser: Parser) -> None:
    parser.add_argument("--dataset", metavar="FILE", help="lines of JSON with prompt and max_tokens")
    _add(parser, "--num-prompts", count, "N", 32, "random prompts")
    _add(parser, "--input-len", lengths, "N|LOW-HIGH", Lengths(128, 128), "tokens of a random prompt")
    _add(parser, "--output-len", lengths, "N|LOW-HIGH", Lengths(128, 128), "tokens of an answer")


def _add_latency_flags(parser: Parser) -> None:
    _add(parser, "--batch-sizes", counts, "N,N,…", [1, 4, 16], "requests at once")
    _add(parser, "--input-lens", counts, "N,N,…", [128, 1024], "tokens of a random prompt")
    _add(parser, "--output-len", count, "N", 32, "tokens of an answer")
    _add(parser, "--repeats", count, "N", 3, "batches of each kind, of which the median counts")


def _add_streaming_flags(parser: Parser) -> None:
    _add(parser, "--streams", count, "N", 256, "requests at once")
    _add(parser, "--output-len", count, "N", 128, "tokens of an answer")
    _add(parser, "--step-ms", milliseconds, "N", 25, "time between steps in milliseconds; 0 is as fast as can be")


def _add_kernel_flags(parser: Parser) -> None:
    _add(parser, "--rows", counts, "N,N,…", [1, 2, 4, 8, 16, 32, 64], "sequences that decode together")
    _add(parser, "--context", count, "N", 512, "tokens of each of them, and of the prompt of the prefill")
    _add(parser, "--repeats", count, "N", 20, "steps of each kind, of which the fastest counts")


def _add_quality_flags(parser: Parser) -> None:
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to read (default: one that comes with Octavo)")
    _add(parser, "--window", count, "N", 512, "tokens that are read together")
