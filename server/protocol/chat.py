"""POST /v1/chat/completions."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.protocol.common import GenerationRequest, Int64, StopReason


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """auto, none, required, or {"type": "function", "function": {"name": …}}."""
    parallel_tool_calls: bool | None = None
    """False: at most one tool call."""
    functions: list[dict[str, Any]] | None = None
    """The older name of tools; the answer has a function_call."""
    function_call: str | dict[str, Any] | None = None
    """The older name of tool_choice."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    reasoning_effort: str | None = None
    """For the chat template; `none` also tells it not to open a reasoning part."""
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    """Most tokens of the reasoning part; -1 for no bound."""
    documents: list[dict[str, Any]] | None = None
    """For templates that print documents."""
    add_generation_prompt: bool | None = None
    """End the prompt with the header of an assistant message (default: unless continue_final_message)."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the answer continues it."""
    chat_template: str | None = None
    """Jinja source to be used instead of the model's, if the server trusts requests with that."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """Of a message; and of a delta, where the index tells which call it belongs to."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    """Null only beside tool calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET
    """Instead of tool_calls, where the request has functions."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: StopReason = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = UNSET
    token_ids: list[int] | UnsetType = UNSET
