"""Flags of the benchmarks, and the types of their values.

A type raises `ArgumentTypeError`, whose text becomes the one line of the refusal. Flags that `vllm bench serve` has
too have its names.
"""

import argparse
import math
import random
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, HttpUrl, Json, StringConstraints, TypeAdapter, ValidationError

from server.flags import Parser

CLIENTS = ("bench serve", "bench sweep")
"""Commands for servers that run elsewhere: no model here, and no settings."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATED, FILE = ("random", "prefix_repetition", "multi_turn"), "custom"
"""Data sets that are made here, and the one that is read from a file."""

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}
"""Short and long names of the latencies."""
OBJECTIVES = ("ttft", "tpot", "e2el")
"""The latencies that --goodput can limit: those of a whole request."""


class Lengths(NamedTuple):
    """A range of numbers of tokens, both ends included."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


Type = Callable[[str], Any]


def typed(kind: Any, what: str) -> Type:
    """The type of what pydantic takes for a `kind`; `what` it is, a refusal says."""
    adapter = TypeAdapter(kind)

    def parse(text: str) -> Any:
        try:
            return adapter.validate_python(text)
        except ValidationError:
            raise argparse.ArgumentTypeError(f"not {what}: {text!r}") from None

    return parse


def number(what: str, **limits: Any) -> Type:
    """The type of finite numbers within `limits`, as pydantic names them."""
    return typed(Annotated[float, Field(allow_inf_nan=False, **limits)], f"a number {what}")


def listed(kind: Type) -> Type:
    """The type of values of one kind between commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def pair(separator: str, first: Any, second: Any, what: str) -> Type:
    """The type of two values on both sides of the first separator."""
    return typed(Annotated[tuple[first, second], BeforeValidator(lambda text: text.split(separator, 1))], what)


Word = Annotated[str, StringConstraints(strip_whitespace=True)]
Key = Annotated[Word, Field(min_length=1)]
Printable = Field(pattern="^[ -~]*$")

count = typed(Annotated[int, Field(ge=1)], "an integer of at least 1")
natural = typed(Annotated[int, Field(ge=0)], "an integer of at least 0")
positive, not_negative = number("above 0", gt=0), number("of at least 0", ge=0)
rate = typed(Annotated[float, Field(gt=0)], "a number above 0, or inf")
share, precision = number("above 0 and at most 1", gt=0, le=1), number("of at least 0.01", ge=0.01)
spread, percentile = number("from 0 to 0.999", ge=0, le=0.999), number("from 0 to at most 100", ge=0, le=100)
json_object = typed(Json[dict[str, Any]], "a JSON object")
metric = typed(Literal[tuple(METRICS)], f"one of {', '.join(METRICS)}")
label = pair("=", Key, Word, "KEY=VALUE")
header = pair("=", Annotated[Key, Printable], Annotated[Word, Printable], "a header, as KEY=VALUE")
objective = pair(
    ":",
    Literal[OBJECTIVES],
    Annotated[float, Field(ge=0, allow_inf_nan=False)],
    f"one of {', '.join(OBJECTIVES)} and a number of milliseconds, as ttft:200",
)


def lengths(text: str) -> Lengths:
    """N, or LOW-HIGH for lengths that are drawn evenly from that range."""
    low, dash, high = text.partition("-")
    found = Lengths(count(low), count(high if dash else low))
    if found.low > found.high:
        raise argparse.ArgumentTypeError(f"the range {text} ends before it begins")
    return found


http_url = typed(HttpUrl, "a URL like http://localhost:8000")


def url(text: str) -> str:
    """An address like http://HOST:PORT or https://HOST/PATH."""
    found = http_url(text)
    if found.query is not None or found.fragment is not None:
        raise argparse.ArgumentTypeError(f"not a URL without a query: {text!r}")
    if found.username is not None or found.password is not None:  # it would be printed and saved
        raise argparse.ArgumentTypeError("a URL must not hold a name or password: give a --header")
    return text


Row = tuple[str, Any, str, Any, str]
"""A flag, its type, how its value is called in the help, its default, and its text.

In place of a type stand the values to choose from, or the action of a switch. A default of `REQUIRED` is none.
"""
REQUIRED = object()
SWITCH, EITHER = "store_true", argparse.BooleanOptionalAction


THROUGHPUT: list[Row] = [
    ("--dataset", str, "FILE", None, "lines of JSON with prompt and max_tokens"),
    ("--num-prompts", count, "N", 32, "random prompts"),
    ("--input-len", lengths, "N|LOW-HIGH", Lengths(128, 128), "tokens of a random prompt"),
    ("--output-len", lengths, "N|LOW-HIGH", Lengths(128, 128), "tokens of an answer"),
]
LATENCY: list[Row] = [
    ("--batch-sizes", listed(count), "N,N,…", [1, 4, 16], "requests at once"),
    ("--input-lens", listed(count), "N,N,…", [128, 1024], "tokens of a random prompt"),
    ("--output-len", count, "N", 32, "tokens of an answer"),
    ("--repeats", count, "N", 3, "batches of each kind, of which the median counts"),
]
STREAMING: list[Row] = [
    ("--streams", count, "N", 256, "requests at once"),
    ("--output-len", count, "N", 128, "tokens of an answer"),
    ("--step-ms", natural, "N", 25, "time between steps in milliseconds; 0 is as fast as can be"),
]
KERNELS: list[Row] = [
    ("--rows", listed(count), "N,N,…", [1, 2, 4, 8, 16, 32, 64], "sequences that decode together"),
    ("--context", count, "N", 512, "tokens of each of them, and of the prompt of the prefill"),
    ("--repeats", count, "N", 20, "steps of each kind, of which the fastest counts"),
]
QUALITY: list[Row] = [
    ("--text", str, "FILE", None, "UTF-8 text to read (default: one that comes with Octavo)"),
    ("--window", count, "N", 512, "tokens that are read together"),
]
SERVER: list[Row] = [
    ("--model", str, "NAME", None, "the model's name (default: the first of /v1/models)"),
    ("--endpoint", (COMPLETIONS, CHAT), "", None, f"(default: {COMPLETIONS}, and {CHAT} for chats)"),
    ("--api-key", str, "TEXT", None, "bearer token (default: OPENAI_API_KEY of the environment)"),
    ("--header", header, "KEY=VALUE …", [], "headers of each request"),
    ("--extra-body", json_object, "JSON", None, "fields of each request; null takes one away"),
    ("--temperature", not_negative, "X", None, "of sampling (default: the server's)"),
    ("--ignore-eos", EITHER, "", None, "answers run to their full length (default: on for generated prompts)"),
    ("--insecure", SWITCH, "", False, "do not verify the server's certificate"),
    ("--ready-check-timeout-sec", not_negative, "SECONDS", 0.0, "how long to wait for the server"),
    ("--request-timeout-sec", positive, "SECONDS", 3600.0, "for a whole answer"),
]
DATA: list[Row] = [
    ("--dataset-name", (*GENERATED, FILE), "", None, f"(default: random, or {FILE} with --dataset-path)"),
    ("--dataset-path", str, "FILE", None, "lines of JSON with prompt, messages or turns, and output_len"),
    ("--input-len", lengths, "N|LOW-HIGH", Lengths(1024, 1024), "tokens of a random prompt or turn"),
    ("--output-len", lengths, "N|LOW-HIGH", Lengths(128, 128), "tokens of an answer"),
    ("--random-range-ratio", spread, "X", 0.0, "draw lengths from (1 - X) to (1 + X) times those"),
    ("--random-prefix-len", natural, "N", 0, "tokens that all random prompts begin with, on top"),
    ("--prefix-repetition-prefix-len", count, "N", 256, "tokens of a shared prefix"),
    ("--prefix-repetition-suffix-len", count, "N", 256, "tokens after it"),
    ("--prefix-repetition-num-prefixes", count, "N", 10, "different prefixes"),
    ("--turns", count, "N", None, "requests of a chat of multi_turn (default: 4)"),
]
RESULTS: list[Row] = [
    ("--percentile-metrics", listed(metric), "NAMES", ["ttft", "tpot", "itl", "e2el"], f"of {', '.join(METRICS)}"),
    ("--metric-percentiles", listed(percentile), "N,N,…", [90.0, 99.0], "of each of them"),
    ("--html", str, "FILE", None, "write a report with plots"),
    ("--plot-timeline", SWITCH, "", False, "write that report beside the saved result"),
    ("--save-result", SWITCH, "", False, "write the JSON document to a file"),
    ("--save-detailed", SWITCH, "", False, "with the times and texts of each request"),
    ("--result-dir", str, "FOLDER", ".", "where to"),
    ("--result-filename", str, "NAME", None, "named how (default: label, rate, model and time)"),
    ("--label", str, "TEXT", "octavo", "kept in the result"),
    ("--metadata", label, "KEY=VALUE …", [], "kept in the result"),
    ("--disable-tqdm", SWITCH, "", False, "no progress bar"),
]
ARRIVALS: list[Row] = [
    ("--burstiness", rate, "X", 1.0, "gamma distribution's shape: 1 is Poisson, less is burstier, inf is even"),
    ("--max-concurrency", count, "N", None, "most requests at once; at a rate, the wait for a place counts as latency"),
    ("--think-time", not_negative, "SECONDS", 0.0, "between an answer and the next turn of its chat"),
    ("--probe-request-rate", not_negative, "X", 0.0, "requests of one token per second, reported apart"),
    ("--num-warmups", natural, "N", 0, "requests before the measurement"),
    ("--seed", natural, "N", 0, "of lengths, prompts and arrivals"),
]
LIMITS = "limits in milliseconds of ttft, tpot, e2el"
LOAD: list[Row] = [
    ("--num-prompts", count, "N", 100, "samples of a run"),
    ("--request-rate", listed(rate), "X[,X…]", [math.inf], "samples per second; several are runs of their own"),
    ("--ramp-up-strategy", ("linear", "exponential"), "", None, "let the rate grow during the run"),
    ("--ramp-up-start-rps", positive, "X", None, "samples per second at its beginning"),
    ("--ramp-up-end-rps", positive, "X", None, "samples per second at its end"),
    ("--repeats", count, "N", None, "runs, for confidence intervals (default: 1; with --compare 3)"),
    ("--compare", url, "URL", None, "a second server: runs alternate, and ratios are printed"),
    ("--goodput", objective, "NAME:MS …", [], f"{LIMITS}; goodput counts the requests that keep them all"),
]
SEARCH: list[Row] = [
    ("--goodput", objective, "NAME:MS …", REQUIRED, f"{LIMITS}, which a request keeps together"),
    ("--attainment", share, "X", 0.9, "share of the requests that must keep them"),
    ("--start-rate", positive, "X", 1.0, "samples per second of the first run"),
    ("--max-rate", positive, "X", 1000.0, "samples per second that are enough"),
    ("--duration", positive, "SECONDS", 30.0, "for which each rate is offered"),
    ("--precision", precision, "X", 0.1, "relative distance of the rates at which the search ends"),
]
CLIENT = {"server": SERVER, "data": DATA, "results": RESULTS, "arrivals": ARRIVALS}

BENCHMARKS: dict[str, tuple[str, dict[str, list[Row]]]] = {
    "throughput": ("tokens per second of many prompts, without HTTP", {"options": THROUGHPUT}),
    "latency": ("time to first token and per token, by batch size and context", {"options": LATENCY}),
    "streaming": ("processor time of the API process per streamed token, without a model", {"options": STREAMING}),
    "kernels": ("each C++ kernel against what the machine can do", {"options": KERNELS}),
    "quality": ("what the weights' type costs against float32", {"options": QUALITY}),
    "serve": ("load on a server of any make, over HTTP", CLIENT | {"load": LOAD}),
    "sweep": ("the highest rate at which it keeps limits", CLIENT | {"search": SEARCH}),
}
"""The benchmarks: what each measures, and its flags in groups."""


def add_benchmarks(bench: Parser) -> dict[str, Parser]:
    """Add a parser for each of the benchmarks; returns them by name."""
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    parsers = {}
    for name, (text, groups) in BENCHMARKS.items():
        parser = parsers[name] = kinds.add_parser(name, help=text)
        if f"bench {name}" in CLIENTS:
            parser.add_argument("url", type=url, metavar="URL", help="an OpenAI-style server, as http://localhost:8000")
        for title, rows in groups.items():
            group = parser if title == "options" else parser.add_argument_group(title)
            for row in rows:
                _add(group, *row)
    unused = {"ramp_up_strategy": None, "compare": None, "repeats": 1, "request_rate": [math.inf], "num_prompts": 1}
    parsers["sweep"].set_defaults(**unused)
    return parsers


def _add(group: Any, name: str, kind: Any, metavar: str, default: Any, text: str) -> None:
    if kind is not SWITCH and default not in (None, REQUIRED, []):
        each = default if isinstance(default, list) else [default]
        text += f" (default: {','.join(f'{x:g}' if isinstance(x, float) else str(x) for x in each)})"
    options: dict[str, Any] = {"required": True} if default is REQUIRED else {"default": default}
    if kind in (SWITCH, EITHER):
        options["action"] = kind
    elif isinstance(kind, tuple):
        options["choices"] = kind
    else:
        options |= {"type": kind, "metavar": metavar.removesuffix(" …"), "nargs": "+" if " …" in metavar else None}
    group.add_argument(name, help=text, **options)
