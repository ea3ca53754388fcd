"""POST /inference/v1/generate: token ids in, token ids out."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.protocol.chat import ChatLogprobs
from server.protocol.common import (
    Int64,
    ModelRequest,
    PromptLogprobs,
    RequestId,
    SamplingFields,
    StopReason,
    StreamOptions,
    Timeout,
    Usage,
    UsageField,
)


class TokenSampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Without max_tokens, as many tokens as the context holds."""

    logprobs: Int64 | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    detokenize: bool | None = None
    """False where no text is asked for; stop strings need it."""


class TokenGenerationRequest(ModelRequest, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "content_parts": ([],),
        "ec_transfer_params": (),
        "features": (),
        "kv_transfer_params": (),
        "reasoning_ended": (),
        "reasoning_parser_kwargs": (),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"token_offsets"})

    request_id: RequestId | None = None
    """Names the request in the answer (default: a random one)."""
    token_ids: list[Int64]
    sampling_params: TokenSampling
    output_mode: Literal["tokens", "text"] | None = None
    """text adds the text, and the texts of tokens to log-probabilities."""
    return_token_ids: bool | None = None
    """Add the prompt's ids to the answer."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    """Lower runs first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is; the server may have a bound of its own."""


class RankedToken(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int | None = None
    """1 for the likeliest."""


class SampledToken(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[RankedToken]


class TokenLogprobList(msgspec.Struct, frozen=True):
    """One entry per generated token."""

    content: list[SampledToken]


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The same for whole answers and chunks."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET


class TokenChoice(_Choice, frozen=True, kw_only=True):
    logprobs: TokenLogprobList | None = None


class TextChoice(_Choice, frozen=True, kw_only=True):
    text: str
    logprobs: ChatLogprobs | None = None


class _Chunk(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    """This and the next, if asked for; of a stream, in the first chunk."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    usage: UsageField = UNSET


class TokenChunk(_Chunk, frozen=True, kw_only=True):
    output_mode: Literal["tokens"] = "tokens"
    choices: list[TokenChoice]


class TextChunk(_Chunk, frozen=True, kw_only=True):
    output_mode: Literal["text"] = "text"
    choices: list[TextChoice]


class _Whole(_Chunk, frozen=True, kw_only=True):
    model: str
    created: int
    """Unix seconds."""
    usage: Usage


class TokenGeneration(_Whole, frozen=True, kw_only=True):
    output_mode: Literal["tokens"] = "tokens"
    choices: list[TokenChoice]


class TextGeneration(_Whole, frozen=True, kw_only=True):
    output_mode: Literal["text"] = "text"
    choices: list[TextChoice]
