"""POST /v1/completions."""

import msgspec
from msgspec import UNSET, UnsetType

from server.protocol.common import GenerationRequest, Int64, PromptLogprobs, StopReason


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | Int64 | list[Int64]]
    """A text, a list of token ids, or a list of either."""
    logprobs: Int64 | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    suffix: str | None = None
    """What comes behind the answer, for models that can fill in the middle."""
    best_of: Int64 | None = None
    """Generate this many choices and answer with the `n` of the highest log-probability per token."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's own tokens, such as the beginning of sequence, around text prompts (default true)."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists with one entry per token: those of the prompt too, with `echo`."""

    tokens: list[str]
    """Texts; `bytes:\\xe2\\x80` for a part of a character."""
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which nothing predicts."""
    top_logprobs: list[dict[str, float] | None]
    """Likeliest tokens as `tokens` writes them; where ids share a text, the chosen or the likeliest has it, others are
    `token_id:7`."""
    text_offset: list[int]
    """Characters that are complete before the token; the first token of the text begins at 0."""

    def joined(self, later: "CompletionLogprobs") -> "CompletionLogprobs":
        return CompletionLogprobs(
            self.tokens + later.tokens,
            self.token_logprobs + later.token_logprobs,
            self.top_logprobs + later.top_logprobs,
            self.text_offset + later.text_offset,
        )


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The same for whole answers and chunks."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
