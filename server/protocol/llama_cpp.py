"""llama.cpp's own routes: /completion, /infill, /props and /slots."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.protocol.common import Int64, ModelRequest

Piece = str | Int64
NativePrompt = str | list[str | Int64 | list[Piece] | dict[str, Any]] | dict[str, Any]


class NativeRequest(ModelRequest, kw_only=True):
    """What requests leave out comes from the checkpoint's generation config, not from llama.cpp's own defaults.

    Samplers that there are not here are passed over and named, as all unknown fields.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "lora": ([],),
        "multimodal_data": ([],),
        "post_sampling_probs": (False,),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"cache_prompt", "id_slot", "n_cache_reuse", "n_discard", "n_keep", "sse_ping_interval"}
    )
    """Hints about the cache; no prompt is cut, so none of it has to be kept."""

    n_predict: Int64 | None = None
    """Most tokens to generate; -1 and -2 are as many as the context holds, 0 computes the prompt alone."""
    max_tokens: Int64 | None = None
    """The same as n_predict."""
    n_cmpl: Int64 | None = None
    """Answers of each prompt."""
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int64 | None = None
    """Penalties look at all tokens, which is -1, or at none, which is 0; other values are named as passed over."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    """-1 stands for none."""
    stop: str | tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float | bool] | list[tuple[Piece, float | bool]] | None = None
    """By token id, or by a text whose tokens all get it; false is never."""
    grammar: str | None = None
    json_schema: bool | dict[str, Any] | None = None
    n_probs: Int64 | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    stream: bool | None = None
    return_tokens: bool | None = None
    """Add the ids of the answer's tokens; streams always have them."""
    response_fields: Annotated[list[str], Meta(max_length=100)] | None = None
    """Only these fields; `timings/prompt_n` is a field of a field, under that name."""


class NativeCompletionRequest(NativeRequest, kw_only=True):
    prompt: NativePrompt
    """A text, token ids, both mixed, an object with `prompt_string`, or a list of these."""


class InfillRequest(NativeRequest, kw_only=True):
    input_prefix: str
    input_suffix: str
    input_extra: list["InfillContext"] | None = None
    """Other files, before the prefix."""
    prompt: str | None = None
    """How the middle begins."""


class InfillContext(msgspec.Struct, frozen=True):
    text: str
    filename: str = "tmp"


class NativeTopLogprob(msgspec.Struct, frozen=True):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class NativeLogprob(NativeTopLogprob, frozen=True):
    top_logprobs: list[NativeTopLogprob]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    cache_n: int
    prompt_n: int
    """Tokens of the prompt that were computed."""
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class NativeChunk(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    content: str
    tokens: list[int]
    stop: bool = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[NativeLogprob] | UnsetType = UNSET


class NativeCompletion(NativeChunk, frozen=True, kw_only=True):
    """A whole answer, or the last chunk of one, without its text."""

    stop: bool = True
    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool = False
    stop_type: str
    """eos, word or limit."""
    stopping_word: str
    tokens_cached: int
    timings: Timings


class Props(msgspec.Struct, frozen=True, kw_only=True):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    """The name alone: where the file is, is nobody's business."""
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool = False


class Slot(msgspec.Struct, frozen=True):
    """As many as requests of one step; which request runs in which is not told apart."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool = False
