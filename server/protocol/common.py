"""What both generating routes share: request fields, usage, the list of models, the error object.

A request field of None was left out (or sent as null): its value comes from the checkpoint's generation config
or from OpenAI's default, see `server/convert.py`.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Send one more chunk with the usage and no choices before `[DONE]`."""
    continuous_usage_stats: bool | None = None
    """Every chunk carries the usage so far."""
    include_obfuscation: bool | None = None
    """Only false is honoured: chunks are not padded."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields of /v1/completions and /v1/chat/completions; those of `SamplingParams` are described there."""

    model: str | None = None
    """The served name; left out, the served model answers."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; wins when both are given."""
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Int64, float] | None = None
    bad_token_ids: tuple[Int64, ...] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[Int64, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int64 | None = None
    """Lower runs first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    user: str | None = None
    """Accepted for OpenAI's clients; has no effect on the answer."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Each prompt counts once, whatever `n` is; completion tokens sum over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


UsageField = Usage | None | UnsetType
"""Of a chunk: absent unless asked for, then null in every chunk but the last."""

StopReason = int | str | UnsetType
"""The stop id or stop string that ended the choice; absent otherwise."""


class Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: Error


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Model]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk of it: what all four kinds begin with."""

    id: str
    object: str
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str
    choices: list[Any] = []
    usage: UsageField = UNSET
