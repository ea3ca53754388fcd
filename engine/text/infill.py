"""Fill in the middle: a prompt of prefix and suffix whose continuation is what stands between them.

The tokens are those that the checkpoints' makers documented; a vocabulary that holds three of one family was trained
with them (Bavarian et al., arXiv 2207.14255, describe both orders).
"""

from dataclasses import dataclass

from configs.errors import InvalidRequest

from .tokenizer import Tokenizer


@dataclass(frozen=True)
class InfillTokens:
    prefix: str
    suffix: str
    middle: str | None
    """Comes last; None where the prefix does."""


FAMILIES = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillTokens("<PRE>", "<SUF>", "<MID>"),
    InfillTokens("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Token ids, with what the tokenizer puts before every text. Raises `InvalidRequest` without such tokens."""
    for family in FAMILIES:
        names = (family.prefix, family.suffix, family.middle)
        ids = [tokenizer.token_id(name) for name in names if name is not None]
        if None not in ids:
            break
    else:
        raise InvalidRequest("the model has no tokens for a suffix (fill in the middle)", param="suffix")
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer.encode("") else []
    before, after = tokenizer.encode(prefix, False), tokenizer.encode(suffix, False)
    if family.middle is None:
        return [*begin, ids[1], *after, ids[0], *before]  # type: ignore[list-item]
    return [*begin, ids[0], *before, ids[1], *after, ids[2]]  # type: ignore[list-item]
