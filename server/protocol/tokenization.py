"""POST /tokenize, /detokenize and /apply-template."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from server.protocol.common import Int64, ModelRequest


class ChatPromptFields(ModelRequest, kw_only=True):
    """What decides a chat's prompt."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
    }

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    """End the prompt with the header of an assistant message (default: unless continue_final_message)."""
    continue_final_message: bool | None = None
    """Leave the last message open."""
    chat_template: str | None = None
    """Jinja source to be used instead of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    tools: list[dict[str, Any]] | None = None


class TokenizeRequest(ChatPromptFields, kw_only=True):
    """vLLM's `prompt` or `messages`; llama.cpp's `content`, whose answer holds `tokens` alone."""

    one_of: ClassVar[tuple[str, ...]] = ("prompt", "messages", "content")
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ChatPromptFields.unsupported,
        "parse_special": (True,),
    }

    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    """Put the tokenizer's own tokens, such as the beginning of sequence, around it (default: around `prompt` alone)."""
    add_special: bool | None = None
    """The same as add_special_tokens."""
    return_token_strs: bool | None = None
    """Of `prompt` and `messages`: add the tokens' spellings in the vocabulary."""
    with_pieces: bool | None = None
    """Of `content`: answer with objects of id and piece."""


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenPiece(msgspec.Struct, frozen=True):
    id: int
    piece: str | list[int]
    """The token's text, or its bytes where they are not whole characters."""


class ContentTokens(msgspec.Struct, frozen=True):
    """llama.cpp's answer."""

    tokens: list[int | TokenPiece]


class DetokenizeRequest(ModelRequest, kw_only=True):
    tokens: list[Int64]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The text under vLLM's name and under llama.cpp's."""

    prompt: str
    content: str


class TemplateRequest(ChatPromptFields, kw_only=True):
    one_of: ClassVar[tuple[str, ...]] = ("messages",)


class TemplateResponse(msgspec.Struct, frozen=True):
    prompt: str
