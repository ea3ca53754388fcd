"""What is asked: random prompts, prompts with shared beginnings, chats of several turns, the lines of a file.

Lengths and contents are drawn apart, so that two servers can be given equal lengths and different tokens: the second
would find the first one's prompts in its prefix cache when both are one.

The tokenizer of a server under test is not here. /v1/completions of most servers takes token ids: the length is exact
whatever the vocabulary. Elsewhere a prompt is made of common English words, most of which are one token each; how many
tokens they are is asked of the server once.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from configs.errors import UsageError

from .flags import COMPLETIONS, Lengths
from .target import Message, Request, Response, Target

FIRST_ID, LAST_ID = 1_000, 30_000
"""Beyond the special tokens and bytes at the beginning of vocabularies, and within all but the smallest."""
NUM_CHECKED = 16

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
        given = [n for n in (self.output_len, self.output_tokens, self.max_tokens) if n is not None]
        prompts = [prompt for prompt in (self.prompt, self.messages) if prompt] + list(self.turns or [])
        if sum(map(bool, (self.prompt, self.messages, self.turns))) != 1:
            raise ValueError("takes exactly one of prompt, messages and turns, not empty")
        if given and given[0] < 1:
            raise ValueError("an output_len must be at least 1")
        return [Request(prompt, given[0] if given else output_len) for prompt in prompts]


def read_lines(flag: str, path: str, output_len: Lengths) -> list[Sample]:
    """The samples of a file; a line without a length gets the middle of `output_len`.

    Raises `UsageError` naming the flag, the file and the line.
    """
    samples = []
    try:
        for number, text in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
            if text.strip():
                try:
                    line = msgspec.json.decode(text, type=Line)
                    samples.append(line.sample((output_len.low + output_len.high) // 2))
                except ValueError as error:
                    raise UsageError(f"{flag} {path}, line {number}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: {error}") from error
    if not samples:
        raise UsageError(f"{flag} {path}: no prompts")
    return samples


class PromptMaker(NamedTuple):
    """Makes random prompts of units, which are token ids or words."""

    description: str
    draw_unit: Callable[[random.Random], int | str]
    tokens_per_unit: float = 1.0

    def units(self, draw: random.Random, num_tokens: int) -> list[int | str]:
        """As near to `num_tokens` as whole units come, and at least one."""
        return [self.draw_unit(draw) for _ in range(max(1, round(num_tokens / self.tokens_per_unit)))]

    @staticmethod
    def prompt(units: Sequence[int | str]) -> str | list[int]:
        ids = [unit for unit in units if isinstance(unit, int)]
        return ids or " ".join(map(str, units))


async def prompt_maker(target: Target) -> PromptMaker:
    """Token ids where the server takes them, else words. Raises `UsageError` when it answers neither."""
    if target.endpoint == COMPLETIONS:
        ids = [FIRST_ID + (LAST_ID - FIRST_ID) * index // (NUM_CHECKED - 1) for index in range(NUM_CHECKED)]
        response = Response(0.0)
        await target.send(Request(ids, 1), response)
        # a server may put a token before them; one that counts otherwise took them for something else
        if response.error is None and response.prompt_tokens in (0, NUM_CHECKED, NUM_CHECKED + 1):
            return PromptMaker("token ids, exact", lambda draw: draw.randint(FIRST_ID, LAST_ID))
    # what more words cost than fewer, by the server's own count: without its template or prefix
    few = WORDS[:8]
    counts = [(await target.check(Request(" ".join(words), 1))).prompt_tokens for words in (few, few + WORDS)]
    tokens_per_word = (counts[1] - counts[0]) / len(WORDS)
    if tokens_per_word <= 0:
        description = "words, one token each unless the server's tokenizer splits them: it sends no usage to tell"
        return PromptMaker(description, lambda draw: draw.choice(WORDS))
    exact = "one token each, exact but for what the server adds"
    description = exact if tokens_per_word == 1 else f"{tokens_per_word:.3g} tokens each, not exact"
    return PromptMaker(f"words, {description}", lambda draw: draw.choice(WORDS), tokens_per_word)


def generate(arguments: argparse.Namespace, maker: PromptMaker, count: int, draws: Draws) -> list[Sample]:
    """The samples of a run over a data set that is made here."""
    is_prefixed = arguments.dataset_name == "prefix_repetition"
    return (_shared_prefix_samples if is_prefixed else _random_samples)(arguments, maker, count, draws)


def _random_samples(arguments: argparse.Namespace, maker: PromptMaker, count: int, draws: Draws) -> list[Sample]:
    """Prompts that share nothing but a prefix of `--random-prefix-len`, which counts on top of their length."""
    ratio = arguments.random_range_ratio
    input_len, output_len = _widened(arguments.input_len, ratio), _widened(arguments.output_len, ratio)
    shared = maker.units(draws.contents, arguments.random_prefix_len) if arguments.random_prefix_len else []

    def request() -> Request:
        units = shared + maker.units(draws.contents, input_len.draw(draws.lengths))
        return Request(maker.prompt(units), output_len.draw(draws.lengths))

    return [[request() for _ in range(arguments.turns)] for _ in range(count)]


def _widened(lengths: Lengths, ratio: float) -> Lengths:
    """From n (1 - ratio) to n (1 + ratio) tokens, at least 1."""
    return Lengths(max(1, math.floor(lengths.low * (1 - ratio))), math.ceil(lengths.high * (1 + ratio)))


def _shared_prefix_samples(arguments: argparse.Namespace, maker: PromptMaker, count: int, draws: Draws) -> list[Sample]:
    """Each of a few prefixes begins an equal number of prompts, in random order."""
    sizes = arguments.prefix_repetition_prefix_len, arguments.prefix_repetition_suffix_len
    prefixes = [maker.units(draws.contents, sizes[0]) for _ in range(arguments.prefix_repetition_num_prefixes)]
    order = [prefixes[index % len(prefixes)] for index in range(count)]
    draws.lengths.shuffle(order)
    prompts = [maker.prompt(prefix + maker.units(draws.contents, sizes[1])) for prefix in order]
    return [[Request(prompt, arguments.output_len.draw(draws.lengths))] for prompt in prompts]
