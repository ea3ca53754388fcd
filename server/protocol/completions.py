"""POST /v1/completions."""

import msgspec
from msgspec import UNSET

from server.protocol.common import GenerationRequest, Int64, StopReason


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | Int64 | list[Int64]]
    """A text, a list of token ids, or a list of either."""
    logprobs: Int64 | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's own tokens, such as the beginning of sequence, around text prompts (default true)."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists with one entry per generated token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where the token begins, in characters; the first generated token begins at 0."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The same for whole answers and chunks."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
