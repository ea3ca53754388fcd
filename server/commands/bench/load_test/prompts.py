"""Random prompts of a wanted number of tokens, for servers whose tokenizer is not here.

/v1/completions of most servers takes token ids: the length is exact whatever the vocabulary. Elsewhere a prompt is made
of common English words, most of which are one token each; how many tokens they are is asked of the server once.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .answer import Answer
from .names import COMPLETIONS
from .target import Ask, Target

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


class PromptMaker(NamedTuple):
    """Makes prompts of units, which are token ids or words."""

    description: str
    draw_unit: Callable[[random.Random], int | str]
    tokens_per_unit: float

    def units(self, draw: random.Random, num_tokens: int) -> list[int | str]:
        """As near to `num_tokens` as whole units come, and at least one."""
        return [self.draw_unit(draw) for _ in range(max(1, round(num_tokens / self.tokens_per_unit)))]

    @staticmethod
    def prompt(units: Sequence[int | str]) -> str | list[int]:
        ids = [unit for unit in units if isinstance(unit, int)]
        return ids or " ".join(unit for unit in units if isinstance(unit, str))


TOKEN_IDS = PromptMaker("token ids, exact", lambda draw: draw.randint(FIRST_ID, LAST_ID), 1.0)


async def prompt_maker(target: Target) -> PromptMaker:
    """The exact kind where the server takes it. Raises `UsageError` when it answers neither."""
    if target.endpoint == COMPLETIONS:
        ids = [FIRST_ID + (LAST_ID - FIRST_ID) * index // (NUM_CHECKED - 1) for index in range(NUM_CHECKED)]
        answer = Answer(0.0)
        await target.send(Ask(ids, 1), answer)
        # a server may put a token before them; one that counts otherwise took them for something else
        if answer.error is None and answer.prompt_tokens in (0, NUM_CHECKED, NUM_CHECKED + 1):
            return TOKEN_IDS
    return await _word_maker(target)


async def _word_maker(target: Target) -> PromptMaker:
    """Tokens per word by the server's own count: what more words cost than fewer, without template or prefix."""
    few = WORDS[:8]
    counts = [(await target.check(Ask(" ".join(words), 1))).prompt_tokens for words in (few, few + WORDS)]
    if not counts[0] < counts[1]:
        return PromptMaker(
            "words, one token each unless the server's tokenizer splits them: it sends no usage to tell",
            lambda draw: draw.choice(WORDS),
            1.0,
        )
    rate = (counts[1] - counts[0]) / len(WORDS)
    told = "one token each, exact but for what the server adds" if rate == 1 else f"{rate:.3g} tokens each, not exact"
    return PromptMaker(f"words, {told}", lambda draw: draw.choice(WORDS), rate)
