"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's Messages API has them.

Content blocks of a request stay plain objects here; `server/convert/messages.py` reads them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from server.protocol.common import Int64, ModelRequest, Timeout


class InputMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]
    """A text, or blocks."""


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int64 | None = None
    """Most tokens of the thinking, with `enabled`; then its end is forced."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves the reasoning out of the answer; otherwise all of it is there."""


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the tool that has to be used, with type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """True: at most one tool use."""


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """For the chat template, as `reasoning_effort`."""
    format: OutputFormat | None = None
    """The answer is JSON that the schema describes."""


class CountTokensRequest(ModelRequest, kw_only=True):
    """A conversation."""

    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control", "metadata", "user_profile_id"})
    """Labels, and hints for a cache that works without them."""

    messages: list[InputMessage]
    """One that ends with an assistant's text is continued by the answer."""
    system: str | list[dict[str, Any]] | None = None
    """A text, or text blocks."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """Left out, the template decides."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of output_config.format."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Int64
    """Where it is more than the context holds, the answer may end before, with model_context_window_exceeded."""
    stream: bool | None = None
    stop_sequences: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is, as with max_tokens; the server may have a bound of its own."""


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""
    """There is nothing that would need one: clients may send any reasoning back."""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's tokens are those of `input_tokens` and those that the cache had."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None
    """end_turn, max_tokens (also where the time is over), model_context_window_exceeded, stop_sequence or tool_use."""
    stop_sequence: str | None
    """The one of stop_sequences that ended the answer."""
    usage: MessageUsage


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: Message


class ContentBlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: Block


class ContentBlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class Stop(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: Stop
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


Event = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
