"""What is asked: random prompts, prompts with shared beginnings, the lines of a file, chats of several turns.

Lengths and contents are drawn apart, so that two servers can be given equal lengths and different tokens: the second
would find the first one's prompts in its prefix cache when both are one.
"""

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from configs.errors import UsageError
from server.commands.bench.flags import Lengths

from .prompts import PromptMaker
from .target import Ask, Message

Sample = list[Ask]
"""What one user asks. Of several requests each waits for the answer to the one before, and continues that chat."""


class Draws(NamedTuple):
    """The sources of one run's randomness."""

    lengths: random.Random
    contents: random.Random
    arrivals: random.Random

    @classmethod
    def of(cls, seed: int, run: object, side: object = "") -> "Draws":
        """Equal runs have equal lengths and arrivals; their contents differ by `side`."""
        names = (f"{run}/lengths", f"{run}/{side}/contents", f"{run}/arrivals")
        return cls(*(random.Random(f"{seed}/{name}") for name in names))


class Line(msgspec.Struct, frozen=True):
    """Of a JSONL file: one of `prompt`, `messages` and `turns`, and how many tokens to answer."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    turns: list[str] | None = None
    """What the user says, turn by turn."""
    output_len: int | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None

    def sample(self, output_len: int) -> Sample:
        given = [n for n in (self.output_len, self.output_tokens, self.max_tokens) if n is not None]
        asked = [prompt for prompt in (self.prompt, self.messages) if prompt] + list(self.turns or [])
        if sum(map(bool, (self.prompt, self.messages, self.turns))) != 1:
            raise ValueError("takes exactly one of prompt, messages and turns, not empty")
        if given and given[0] < 1:
            raise ValueError("an output_len must be at least 1")
        return [Ask(prompt, given[0] if given else output_len) for prompt in asked]


def read_lines(path: str, output_len: Lengths) -> list[Sample]:
    """Raises `UsageError` naming the file and line. A line without a length gets the middle of `output_len`."""
    try:
        texts = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--dataset-path {path}: {error}") from error
    samples = []
    for number, text in enumerate(texts, start=1):
        if text.strip():
            try:
                line = msgspec.json.decode(text, type=Line)
                samples.append(line.sample((output_len.low + output_len.high) // 2))
            except (msgspec.MsgspecError, ValueError) as error:
                raise UsageError(f"--dataset-path {path}, line {number}: {error}") from error
    if not samples:
        raise UsageError(f"--dataset-path {path}: no prompts")
    return samples


def needs_chat(samples: list[Sample]) -> bool:
    """Whether messages or turns are among them."""
    return any(len(sample) > 1 or (sample[0].prompt and isinstance(sample[0].prompt[0], dict)) for sample in samples)


def widened(lengths: Lengths, ratio: float) -> Lengths:
    """From n (1 - ratio) to n (1 + ratio) tokens, at least 1."""
    return Lengths(max(1, math.floor(lengths.low * (1 - ratio))), math.ceil(lengths.high * (1 + ratio)))


def random_samples(arguments: argparse.Namespace, maker: PromptMaker, count: int, draws: Draws) -> list[Sample]:
    """Prompts that share nothing but a prefix of `--random-prefix-len`, which counts on top of their length."""
    ratio = arguments.random_range_ratio
    input_len, output_len = widened(arguments.input_len, ratio), widened(arguments.output_len, ratio)
    shared = maker.units(draws.contents, arguments.random_prefix_len) if arguments.random_prefix_len else []
    samples = []
    for _ in range(count):
        asks = []
        for _ in range(arguments.turns):
            units = shared + maker.units(draws.contents, input_len.draw(draws.lengths))
            asks.append(Ask(maker.prompt(units), output_len.draw(draws.lengths)))
        samples.append(asks)
    return samples


def shared_prefix_samples(arguments: argparse.Namespace, maker: PromptMaker, count: int, draws: Draws) -> list[Sample]:
    """Each of a few prefixes begins an equal number of prompts, in random order."""
    prefixes = [
        maker.units(draws.contents, arguments.prefix_repetition_prefix_len)
        for _ in range(arguments.prefix_repetition_num_prefixes)
    ]
    order = [prefixes[index % len(prefixes)] for index in range(count)]
    draws.lengths.shuffle(order)
    samples = []
    for prefix in order:
        units = prefix + maker.units(draws.contents, arguments.prefix_repetition_suffix_len)
        samples.append([Ask(maker.prompt(units), arguments.output_len.draw(draws.lengths))])
    return samples


Generator = Callable[[argparse.Namespace, PromptMaker, int, Draws], list[Sample]]
GENERATORS: dict[str, Generator] = {
    "random": random_samples,
    "prefix_repetition": shared_prefix_samples,
    "multi_turn": random_samples,
}
