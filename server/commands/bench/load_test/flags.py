"""Flags of `octavo bench serve` and `octavo bench sweep`; those that `vllm bench serve` has too have its names."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from server.flags import Parser

from .flag_types import (
    header,
    integer,
    json_object,
    metrics,
    number,
    objective,
    pair,
    percentiles,
    rate,
    rates,
)
from .names import CHAT, COMPLETIONS, FILE, GENERATED, METRICS

Type = Callable[[str], Any]
POSITIVE = number(0, above=True)


def add_serve_flags(parser: Parser, count: Type, lengths: Type) -> None:
    """`count` and `lengths`: types of the other benchmarks' flags."""
    _add_common_flags(parser, count, lengths)
    load = parser.add_argument_group("load")
    _add(load, "--num-prompts", count, "N", 100, "samples of a run")
    text = "samples per second; several are runs of their own; inf sends them as --max-concurrency allows"
    _add(load, "--request-rate", rates, "X[,X…]", [math.inf], text, shown="inf")
    load.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow during the run")
    _add(load, "--ramp-up-start-rps", POSITIVE, "X", None, "samples per second at its beginning")
    _add(load, "--ramp-up-end-rps", POSITIVE, "X", None, "samples per second at its end")
    _add(load, "--repeats", count, "N", None, "runs, for confidence intervals", shown="1; with --compare 3")
    _add(load, "--compare", str, "URL", None, "a second server: runs alternate, and ratios are printed")
    text = "limits in milliseconds of ttft, tpot, e2el; goodput counts the requests that keep them all"
    load.add_argument("--goodput", type=objective, nargs="+", default=[], metavar="NAME:MS", help=text)


def add_sweep_flags(parser: Parser, count: Type, lengths: Type) -> None:
    """`count` and `lengths`: types of the other benchmarks' flags."""
    _add_common_flags(parser, count, lengths)
    parser.set_defaults(ramp_up_strategy=None, compare=None, repeats=1, request_rate=[math.inf], num_prompts=1)
    search = parser.add_argument_group("search")
    text = "limits in milliseconds of ttft, tpot, e2el, which a request keeps together"
    search.add_argument("--goodput", type=objective, nargs="+", required=True, metavar="NAME:MS", help=text)
    share = number(0, above=True, high=1)
    _add(search, "--attainment", share, "X", 0.9, "share of the requests that must keep them")
    _add(search, "--start-rate", POSITIVE, "X", 1.0, "samples per second of the first run")
    _add(search, "--max-rate", POSITIVE, "X", 1000.0, "samples per second that are enough")
    _add(search, "--duration", POSITIVE, "SECONDS", 30.0, "for which each rate is offered")
    _add(search, "--precision", number(0.01), "X", 0.1, "relative distance of the rates at which the search ends")


def _add(group: Any, flag: str, kind: Type, metavar: str, default: object, text: str, *, shown: object = None) -> None:
    """The help names the default, or what is `shown` in its place; None goes without saying."""
    shown = default if shown is None else shown
    text = (
        text
        if shown is None
        else f"{text} (default: {shown:g})"
        if isinstance(shown, float)
        else f"{text} (default: {shown})"
    )
    group.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)


def _add_common_flags(parser: Parser, count: Type, lengths: Type) -> None:
    parser.add_argument("url", metavar="URL", help="an OpenAI-style server, as http://localhost:8000")
    _add_server_flags(parser)
    _add_data_flags(parser, count, lengths)
    _add_result_flags(parser)
    group = parser.add_argument_group("arrivals")
    text = "shape of the gamma distribution of intervals: 1 is Poisson, less is burstier, inf is even"
    _add(group, "--burstiness", rate, "X", 1.0, text)
    text = "most requests at once; where a rate is given, the wait for a place counts as latency"
    _add(group, "--max-concurrency", count, "N", None, text)
    _add(group, "--think-time", number(0), "SECONDS", 0.0, "between an answer and the next turn of its chat")
    text = "requests of one token per second beside the load, which are reported apart"
    _add(group, "--probe-request-rate", number(0), "X", 0.0, text)
    _add(group, "--num-warmups", integer, "N", 0, "requests before the measurement")
    _add(group, "--seed", integer, "N", 0, "of lengths, prompts and arrivals")


def _add_server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    _add(group, "--model", str, "NAME", None, "the model's name", shown="the first of /v1/models")
    text = f"(default: {COMPLETIONS}, and {CHAT} for chats)"
    group.add_argument("--endpoint", choices=(COMPLETIONS, CHAT), help=text)
    _add(group, "--api-key", str, "TEXT", None, "bearer token", shown="OPENAI_API_KEY of the environment")
    group.add_argument("--header", type=header, nargs="*", metavar="KEY=VALUE", help="headers of each request")
    _add(group, "--extra-body", json_object, "JSON", None, "fields of each request; null takes one away")
    _add(group, "--temperature", number(0), "X", None, "of sampling", shown="the server's")
    text = "answers run to their full length (default: on for generated prompts)"
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help=text)
    group.add_argument("--insecure", action="store_true", help="do not verify the server's certificate")
    _add(group, "--ready-check-timeout-sec", number(0), "SECONDS", 0.0, "how long to wait for the server")
    _add(group, "--request-timeout-sec", POSITIVE, "SECONDS", 3600.0, "for a whole answer")


def _add_data_flags(parser: Parser, count: Type, lengths: Type) -> None:
    group = parser.add_argument_group("data")
    text = f"(default: random, or {FILE} with --dataset-path)"
    group.add_argument("--dataset-name", choices=(*GENERATED, FILE), help=text)
    text = "lines of JSON with prompt, messages or turns, and output_len"
    _add(group, "--dataset-path", str, "FILE", None, text)
    _add(group, "--input-len", lengths, "N|LOW-HIGH", lengths("1024"), "tokens of a random prompt or turn")
    _add(group, "--output-len", lengths, "N|LOW-HIGH", lengths("128"), "tokens of an answer")
    text = "draw lengths from (1 - X) to (1 + X) times those"
    _add(group, "--random-range-ratio", number(0, high=0.999), "X", 0.0, text)
    _add(group, "--random-prefix-len", integer, "N", 0, "tokens that all random prompts begin with, on top")
    _add(group, "--prefix-repetition-prefix-len", count, "N", 256, "tokens of a shared prefix")
    _add(group, "--prefix-repetition-suffix-len", count, "N", 256, "tokens after it")
    _add(group, "--prefix-repetition-num-prefixes", count, "N", 10, "different prefixes")
    _add(group, "--turns", count, "N", None, "requests of a chat of multi_turn", shown=4)


def _add_result_flags(parser: Parser) -> None:
    group = parser.add_argument_group("results")
    default = ["ttft", "tpot", "itl", "e2el"]
    _add(group, "--percentile-metrics", metrics, "NAMES", default, f"of {', '.join(METRICS)}", shown=",".join(default))
    _add(group, "--metric-percentiles", percentiles, "N,N,…", [90.0, 99.0], "of each of them", shown="90,99")
    _add(group, "--html", str, "FILE", None, "write a report with plots")
    group.add_argument("--plot-timeline", action="store_true", help="write that report beside the saved result")
    group.add_argument("--save-result", action="store_true", help="write the JSON document to a file")
    group.add_argument("--save-detailed", action="store_true", help="with the times and texts of each request")
    _add(group, "--result-dir", str, "FOLDER", ".", "where to")
    _add(group, "--result-filename", str, "NAME", None, "named how", shown="label, rate, model and time")
    _add(group, "--label", str, "TEXT", "octavo", "kept in the result")
    group.add_argument("--metadata", type=pair, nargs="*", default=[], metavar="KEY=VALUE", help="kept in the result")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
