"""Items of the Responses API: what goes into a model and what comes out of it, in requests and in answers."""

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from server.logprobs import TokenLogprob

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
    encrypted_content: str | UnsetType | None = UNSET
    """Another server's; nothing here can read it."""


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag="function_call"):
    id: str | None = None
    status: Status | None = None
    call_id: str
    """Names the call in its output."""
    name: str
    namespace: str | UnsetType = UNSET
    """The namespace of the function, where it is in one."""
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


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True, tag="namespace", omit_defaults=True):
    """A group of functions. Calls of them name it beside the function."""

    name: str
    description: str | None = None
    tools: list[FunctionTool]


def flat_name(namespace: str | UnsetType | None, name: str) -> str:
    """The function's name where there are no namespaces."""
    return f"{namespace}__{name}" if namespace else name


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """One page of GET /v1/responses/{id}/input_items."""

    object: str = "list"
    data: list[Item]
    first_id: str
    """This and `last_id`: empty when the page is."""
    last_id: str
    has_more: bool
