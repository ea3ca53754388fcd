"""POST /v1/embeddings, /pooling, /score and /rerank, which all are embeddings of prompts."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from server.protocol.common import Int64, ModelRequest, Timeout

MAX_INPUTS = 2048
"""Of one request, as at OpenAI's."""

Texts = str | list[str]

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "padding": ("do_not_pad",),
}


class PoolingFields(ModelRequest, kw_only=True):
    """How prompts become embeddings."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED
    without_effect: ClassVar[frozenset[str]] = frozenset({"user"})

    pooling: Literal["last", "mean"] | None = None
    """Of the final hidden states: that of the last token, or their mean (default: the server's setting)."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's own tokens, such as the beginning of sequence, around it (default true; of chats false)."""
    truncate_prompt_tokens: Int64 | None = None
    """Keep only this many tokens of each prompt; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """What is cut off: left, the default, keeps the last tokens."""
    priority: Int64 | None = None
    """Lower runs first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    timeout_s: Timeout | None = None
    """Seconds until the request fails with 408; the server may have a bound of its own."""


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Either `input` or `messages`."""

    one_of: ClassVar[tuple[str, ...]] = ("input", "messages")
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED | {
        "embed_dtype": ("float32",),
        "endianness": ("little", "native"),
    }

    input: str | list[str | Int64 | list[Int64]] | None = None
    """A text, a list of token ids, or a list of either."""
    messages: list[dict[str, Any]] | None = None
    """A chat, whose whole prompt is embedded."""
    add_generation_prompt: bool | None = None
    """End the chat's prompt with the header of an assistant message (default false)."""
    continue_final_message: bool | None = None
    """Leave the last message open."""
    chat_template: str | None = None
    """Jinja source to be used instead of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the base64 form of little-endian float32."""
    dimensions: Int64 | None = None
    """Keep only this many numbers of each embedding, the first; they are scaled to length 1 again."""
    normalize: bool | None = None
    """Scale embeddings to length 1 (default true; of /pooling false)."""
    use_activation: bool | None = None
    """The same as `normalize`."""
    embd_normalize: Literal[-1, 2] | None = None
    """The same as `normalize`: 2 scales to (Euclidean) length 1, -1 does not."""


class PoolingRequest(EmbeddingRequest, kw_only=True):
    task: Literal["embed"] | None = None


class PromptUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "pooling"
    index: int
    data: list[float] | str


class _PoolingResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    """Unix seconds."""
    model: str
    usage: PromptUsage


class EmbeddingResponse(_PoolingResponse, frozen=True, kw_only=True):
    data: list[Embedding]


class PoolingResponse(_PoolingResponse, frozen=True, kw_only=True):
    data: list[Pooled]


class ScoringFields(PoolingFields, kw_only=True):
    """Scores are cosines of the embeddings' angles."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED | {
        "chat_template_kwargs": ({},),
        "instruction": (),
        "use_activation": (),
    }

    max_tokens_per_query: Int64 | None = None
    """Keep only this many tokens of the query, the first; 0 keeps all."""
    max_tokens_per_doc: Int64 | None = None
    """Keep only this many tokens of each document, the first; 0 keeps all."""


SCORE_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


class ScoreRequest(ScoringFields, kw_only=True):
    """One text against each of several, or two lists of the same length in pairs: one of `SCORE_PAIRS`."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "score"
    index: int
    score: float


class ScoreResponse(_PoolingResponse, frozen=True, kw_only=True):
    data: list[Score]


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankRequest(ScoringFields, kw_only=True):
    query: str
    documents: list[str | Document]
    top_n: Int64 | None = None
    """Answer with this many of the best; 0, the default, with all."""
    return_documents: bool | None = None
    """False leaves the texts out of the answer."""


class RerankResult(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    usage: PromptUsage
    results: list[RerankResult]
    """The best first."""
