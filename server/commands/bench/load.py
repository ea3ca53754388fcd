"""A load on one server: what is asked, when it is due, and sending it.

Open loop: a sample is due at its arrival, whatever the server does, and its latencies count from then. A stalled server
cannot hold back the requests that would have felt the stall. Closed loop: a fixed number of users, each of whom asks
as soon as it has its answer.

Lengths and contents are drawn apart, so that two servers can be given equal lengths and different tokens: the second
would find the first one's prompts in its prefix cache when both are one.

The tokenizer of a server under test is not here. /v1/completions of most servers takes token ids: the length is exact
whatever the vocabulary. Elsewhere a prompt is made of common English words, most of which are one token each; how many
tokens they are is asked of the server once.
"""

import argparse
import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm

from configs.errors import UsageError

from .flags import COMPLETIONS, GENERATED, Lengths
from .measure import Run
from .target import Message, Request, Response, Target, as_messages

FIRST_ID, LAST_ID = 1_000, 30_000
"""Beyond the special tokens and bytes at the beginning of vocabularies, and within all but the smallest."""
NUM_CHECKED = 16
SMALL_REQUEST = Request("Hi", 1)

COMMON = (
    "the of and to in is that it for was on are as with his they at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who its now find long down day did get come made may part over new "
    "sound take only little work know place year live me back give most very after thing our just name good "
    "sentence man think say great where help through much before line right too mean old any same tell boy follow "
    "came want show also around form three"
)
WORDS = COMMON.split()

Sample = list[Request]
"""What one user asks. Of several requests each waits for the answer to the one before, and continues that chat."""


class Line(msgspec.Struct, frozen=True):
    """A line of a file: one of `prompt`, `messages` and `turns`, and how many tokens to answer."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    turns: list[str] | None = None
    """What the user says, turn by turn."""
    output_len: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None

    def sample(self, output_len: int) -> Sample:
        """Raises `ValueError` for a line that asks nothing, or more than one thing."""
        lengths = [n for n in (self.output_len, self.output_tokens, self.max_tokens) if n is not None] or [output_len]
        if sum(map(bool, (self.prompt, self.messages, self.turns))) != 1:
            raise ValueError("takes exactly one of prompt, messages and turns, not empty")
        if lengths[0] < 1:
            raise ValueError("an output_len must be at least 1")
        prompts = [prompt for prompt in (self.prompt, self.messages) if prompt] + list(self.turns or [])
        return [Request(prompt, lengths[0]) for prompt in prompts]


def read_lines(flag: str, path: str, output_len: Lengths) -> list[Sample]:
    """The samples of a file; a line without a length gets the middle of `output_len`.

    Raises `UsageError` naming the flag, the file and the line.
    """
    samples = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                samples.append(msgspec.json.decode(line, type=Line).sample(sum(output_len) // 2))
            except ValueError as error:
                raise UsageError(f"{flag} {path}, line {number}: {error}") from error
    if not samples:
        raise UsageError(f"{flag} {path}: no prompts")
    return samples


class Draws(NamedTuple):
    """The sources of one run's randomness."""

    lengths: random.Random
    contents: random.Random
    arrivals: random.Random

    @classmethod
    def of(cls, seed: int, run: object, side: str) -> "Draws":
        """Equal runs have equal lengths and arrivals; their contents differ by `side`."""
        names = (f"{run}/lengths", f"{run}/{side}/contents", f"{run}/arrivals")
        return cls(*(random.Random(f"{seed}/{name}") for name in names))


class PromptMaker(NamedTuple):
    """Makes random prompts of units, which are token ids or words."""

    description: str
    units: Sequence[Any]
    tokens_per_unit: float = 1.0

    def draw(self, source: random.Random, num_tokens: int) -> list[Any]:
        """As near to `num_tokens` as whole units come, and at least one."""
        return source.choices(self.units, k=max(1, round(num_tokens / self.tokens_per_unit)))

    def samples(self, arguments: argparse.Namespace, count: int, draws: Draws) -> list[Sample]:
        """The samples of a run over a data set that is made here."""
        if arguments.dataset_name == "prefix_repetition":  # each prefix begins an equal number of prompts
            length, num_prefixes = arguments.prefix_repetition_prefix_len, arguments.prefix_repetition_num_prefixes
            prefixes = [self.draw(draws.contents, length) for _ in range(num_prefixes)]
            order = [prefixes[index % num_prefixes] for index in range(count)]
            draws.lengths.shuffle(order)
            length, turns, ratio = arguments.prefix_repetition_suffix_len, 1, 0.0
            input_len = Lengths(length, length)
        else:  # prompts share nothing but a prefix, which counts on top of their length
            length, turns, ratio = arguments.random_prefix_len, arguments.turns, arguments.random_range_ratio
            order = [self.draw(draws.contents, length) if length else []] * count
            input_len = _widened(arguments.input_len, ratio)
        output_len = _widened(arguments.output_len, ratio)

        def request(prefix: list[Any]) -> Request:
            units = prefix + self.draw(draws.contents, input_len.draw(draws.lengths))
            return Request(units if isinstance(units[0], int) else " ".join(units), output_len.draw(draws.lengths))

        return [[request(prefix) for _ in range(turns)] for prefix in order]


def _widened(lengths: Lengths, ratio: float) -> Lengths:
    """From n (1 - ratio) to n (1 + ratio) tokens, at least 1."""
    return Lengths(max(1, math.floor(lengths.low * (1 - ratio))), math.ceil(lengths.high * (1 + ratio)))


async def prompt_maker(target: Target) -> PromptMaker:
    """Token ids where the server takes them, else words. Raises `UsageError` when it answers neither."""
    if target.endpoint == COMPLETIONS:
        ids = np.linspace(FIRST_ID, LAST_ID, NUM_CHECKED, dtype=int).tolist()
        response = await target.send(Request(ids, 1))
        # a server may put a token before them; one that counts otherwise took them for something else
        if not response.error and response.prompt_tokens in (0, NUM_CHECKED, NUM_CHECKED + 1):
            return PromptMaker("token ids, exact", range(FIRST_ID, LAST_ID + 1))
    # what more words cost than fewer, by the server's own count: without its template or prefix
    few = WORDS[:8]
    counts = [(await target.check(Request(" ".join(words), 1))).prompt_tokens for words in (few, few + WORDS)]
    tokens_per_word = (counts[1] - counts[0]) / len(WORDS)
    if tokens_per_word <= 0:
        unknown = "one token each unless the server's tokenizer splits them: it sends no usage to tell"
        return PromptMaker(f"words, {unknown}", WORDS)
    exact = "one token each, exact but for what the server adds"
    description = exact if tokens_per_word == 1 else f"{tokens_per_word:.3g} tokens each, not exact"
    return PromptMaker(f"words, {description}", WORDS, tokens_per_word)


def arrival_times(rates: Sequence[float], burstiness: float, draw: random.Random) -> list[float]:
    """Ascending seconds, one for each of the rates, in requests per second, at which the requests come.

    The intervals come from a gamma distribution of mean 1 / rate and shape `burstiness`: 1 is a Poisson process, less
    is burstier, infinity is a metronome. The variance of an interval is (1 / rate)² / burstiness. At a constant rate
    the last is exactly `count / rate`, so that every draw offers the same load.
    """
    is_even = math.isinf(burstiness)
    gaps = [1 / rate if is_even else draw.gammavariate(burstiness, 1 / (rate * burstiness)) for rate in rates]
    times = list(accumulate(gaps))
    stretch = len(rates) / rates[0] / times[-1] if rates[0] == rates[-1] else 1.0
    return [time * stretch for time in times]


class Bench:
    """A server that is ready, and the workload for it."""

    def __init__(self, url: str, arguments: argparse.Namespace, side: str = "") -> None:
        """Prompts of another `side` have equal lengths and other contents."""
        self.target = Target(url, arguments)
        self.arguments = arguments
        self.side = side
        self._maker: PromptMaker | None = None
        self._num_read = 0
        self._places = asyncio.Semaphore(arguments.max_concurrency or 2**31)

    async def open(self) -> None:
        """Wait for the server, ask it a first request, and warm it up. Raises `UsageError`."""
        arguments = self.arguments
        await self.target.wait_until_ready(arguments.ready_check_timeout_sec)
        if arguments.dataset_name in GENERATED:
            self._maker = await prompt_maker(self.target)
        first, *others = self._samples(1 + arguments.num_warmups, Draws.of(arguments.seed, "warm-up", self.side))
        self._num_read = 0
        await self.target.check(first[0])
        run = await self.drive(Run(), [sample[:1] for sample in others])
        if run.interrupted:
            raise UsageError("interrupted during the warm-up")

    @property
    def prompts(self) -> str:
        """How prompts are made."""
        return self._maker.description if self._maker else f"lines of {self.arguments.dataset_path}"

    def _samples(self, count: int, draws: Draws) -> list[Sample]:
        """Lines of a file follow each other from one run to the next, and begin anew at its end."""
        if self._maker:
            return self._maker.samples(self.arguments, count, draws)
        lines: list[Sample] = self.arguments.lines
        begin, self._num_read = self._num_read, self._num_read + count
        return [lines[index % len(lines)] for index in range(begin, begin + count)]

    async def run(self, rate: float, name: object, count: int, stop: Callable[[Response], bool] | None = None) -> Run:
        """Offer `rate` samples per second, or as many as there are places for.

        Runs of equal names have equal lengths and arrivals.
        """
        arguments = self.arguments
        draws = Draws.of(arguments.seed, name, self.side)
        samples = self._samples(count, draws)
        rates = [] if math.isinf(rate) else [rate] * count
        if arguments.ramp_up_strategy is not None:
            spaced = np.linspace if arguments.ramp_up_strategy == "linear" else np.geomspace
            rates = spaced(arguments.ramp_up_start_rps, arguments.ramp_up_end_rps, count).tolist()
        arrivals = arrival_times(rates, arguments.burstiness, draws.arrivals) if rates else None
        tqdm.monitor_interval = 0  # no thread of its own beside the one that reads the clock
        hidden = True if arguments.disable_tqdm else None  # None: unless stderr is a terminal
        with tqdm(total=sum(map(len, samples)), desc=self.target.url, unit="req", leave=False, disable=hidden) as bar:

            def on_response(response: Response) -> bool:
                bar.update()
                return stop is not None and stop(response)

            run = await self.drive(Run(on_response), samples, arrivals, arguments.probe_request_rate)
        run.measure(arguments)
        return run

    async def drive(
        self, run: Run, samples: Sequence[Sample], arrivals: Sequence[float] | None = None, probe_rate: float = 0.0
    ) -> Run:
        """Ctrl-C ends the run and keeps the responses that were whole."""
        with run.health.watch():
            run.began = time.perf_counter()
            run.work = asyncio.create_task(self._send_all(samples, arrivals, run))
            probing = asyncio.create_task(self._probe(probe_rate, run))
            try:
                await asyncio.wait([run.work])
            except asyncio.CancelledError:
                run.interrupted = True
                if task := asyncio.current_task():
                    task.uncancel()  # it goes on to report
            run.duration = time.perf_counter() - run.began
        run.work.cancel()
        probing.cancel()
        ends = await asyncio.gather(run.work, probing, return_exceptions=True)
        if isinstance(ends[0], Exception):
            raise ends[0]
        return run

    async def _send_all(self, samples: Sequence[Sample], arrivals: Sequence[float] | None, run: Run) -> None:
        waiting = iter(samples)

        async def user() -> None:
            for sample in waiting:
                await self._chat(sample, None, run)

        async with asyncio.TaskGroup() as group:
            if arrivals is None:
                for _ in range(min(self.arguments.max_concurrency or len(samples), len(samples))):
                    group.create_task(user())
            for arrival in arrivals or ():
                await _sleep_until(run.began + arrival)
                group.create_task(self._chat(next(waiting), run.began + arrival, run))

    async def _chat(self, sample: Sample, due: float | None, run: Run) -> None:
        """`due`: when the first request should be sent, and waits for a place from then on; None for now."""
        history: list[Message] = []
        for request in sample:
            now = time.perf_counter()
            if due is not None:
                run.health.late_sends.append(max(0.0, now - due))
            if history:
                request = Request(history + as_messages(request.prompt), request.output_len)
            async with self._places:
                # a timer's step may be too early by half a millisecond
                response = await self.target.send(request, now if due is None else min(due, now))
            run.keep(response)
            if response.error:
                return
            if len(sample) > 1:
                history = [*as_messages(request.prompt), {"role": "assistant", "content": response.text}]
                due = response.end + self.arguments.think_time
                await _sleep_until(due)

    async def _probe(self, rate: float, run: Run) -> None:
        """Requests of one token, outside the limit of requests at once, each at its time."""

        async def send(due: float) -> None:
            run.probes.append(await self.target.send(SMALL_REQUEST, due))

        async with asyncio.TaskGroup() as group:
            due = run.began
            while rate:
                await _sleep_until(due)
                group.create_task(send(due))
                due += 1 / rate


async def _sleep_until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
