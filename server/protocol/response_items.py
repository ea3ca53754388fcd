"""Items of the Responses API: what goes into a model and what comes out of it, in requests and in answers."""

from typing import Any, Literal, TypeAlias

import msgspec

from server.protocol.chat import TokenLogprob

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, frozen=True, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] | None = []


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    refusal: str


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str | None = None
    """This and the status: null only in what clients send, here and below."""
    status: Status | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    """A string only in what clients send."""


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    id: str | None = None
    status: Status | None = None
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    """Another server's; nothing here can read it."""


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str | None = None
    status: Status | None = None
    call_id: str
    """Names the call in its output."""
    name: str
    arguments: str
    """JSON."""


class FunctionCallOutputItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call_output"):
    id: str | None = None
    status: Status | None = None
    call_id: str
    output: str | list[InputText]


class ItemReference(msgspec.Struct, frozen=True, kw_only=True, tag="item_reference"):
    """Stands for an item of a stored response."""

    id: str


Item: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem
OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, tag="function", omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    """This and the three below: what asks for nothing."""
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: None = None
    is_async: Literal[False] | None = msgspec.field(default=None, name="async")


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """One page of GET /v1/responses/{id}/input_items."""

    object: str = "list"
    data: list[Item]
    first_id: str
    """This and `last_id`: empty when the page is."""
    last_id: str
    has_more: bool
