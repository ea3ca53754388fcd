"""Requests and answers of Anthropic's Messages API, under the names that its Python package has for them."""

import re
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypeAliasType, TypedDict

from server.bodies import Hint, ModelRequest
from server.openai.base import Timeout
from server.sampling import Text
from server.structured import CLOSED

_OF_SERVER_TOOLS = r"^(server_tool_use|mcp_tool_use|container_upload|compaction|.+_tool_result)$"
"""Types of blocks that only Anthropic's own server writes and reads."""


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[str | None]
    """Empty in answers: there is nothing that would need one, and clients may send any reasoning back."""


class RedactedThinkingBlock(TypedDict):
    type: Literal["redacted_thinking"]


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: NotRequired[Any]
    """An object; in requests whatever a model wrote."""


class ToolResultBlock(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[str | list[dict[str, Any]] | None]
    """A text, or parts; those that are no text leave a word in their place."""
    is_error: NotRequired[bool | None]


class ServerToolBlock(TypedDict):
    """A block of a tool that Anthropic's servers run, which is passed over."""

    type: Annotated[str, Field(pattern=_OF_SERVER_TOOLS)]


def _block_type(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        return None
    return "server_tool" if re.match(_OF_SERVER_TOOLS, kind) else kind


ContentBlockParam = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ServerToolBlock, Tag("server_tool")],
    Discriminator(_block_type),
]


class MessageParam(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlockParam]
    """Texts stand anywhere, results of tools in users' messages, the others in the assistant's."""


class ToolParam(TypedDict):
    """A function of the client's."""

    type: NotRequired[Literal["custom"] | None]
    name: Text
    description: NotRequired[str | None]
    input_schema: dict[str, Any]
    """A JSON schema."""
    strict: NotRequired[bool | None]
    """True: calls have arguments that the schema describes, or the request is refused."""


class ServerToolParam(TypedDict):
    """A tool that Anthropic's servers run, or that only Anthropic's models were trained for: it is passed over."""

    type: Annotated[str, Field(json_schema_extra={"not": {"const": "custom"}})]


def _tool_type(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "server_tool" if isinstance(kind, str) and kind != "custom" else "custom"


ToolUnionParam = Annotated[
    Annotated[ToolParam, Tag("custom")] | Annotated[ServerToolParam, Tag("server_tool")], Discriminator(_tool_type)
]


class _Closed(BaseModel):
    """An object that has no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ToolChoice(_Closed):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the tool that has to be used, with type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """True: at most one tool use."""


class ThinkingConfig(_Closed):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """Most tokens of the thinking; then its end is forced."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves the reasoning out of the answer; otherwise all of it is there."""


@CLOSED
class OutputFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(_Closed):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """For the chat template, as `reasoning_effort`."""
    format: OutputFormat | None = None
    """The answer is JSON that the schema describes."""


class CountTokensRequest(ModelRequest):
    """A conversation."""

    messages: Annotated[list[MessageParam], Field(min_length=1)]
    """One that ends with an assistant's text is continued by the answer."""
    system: str | list[TextBlock] | None = None
    tools: list[ToolUnionParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    """Left out, the template decides."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of output_config.format."""

    container: Annotated[Any, Hint()] = None
    context_management: Annotated[
        Any, Hint(({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}))
    ] = None
    diagnostics: Annotated[Any, Hint()] = None
    inference_geo: Annotated[Any, Hint()] = None
    mcp_servers: Annotated[Any, Hint(([],))] = None
    service_tier: Annotated[Any, Hint(("auto", "standard_only"))] = None
    speed: Annotated[Any, Hint(("standard",))] = None
    cache_control: Any = None
    """For a cache that works without it."""
    metadata: Any = None
    """A label, as user_profile_id: it changes nothing."""
    user_profile_id: Any = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    """Where it is more than the context holds, the answer may end before, with model_context_window_exceeded."""
    stream: bool | None = None
    stop_sequences: tuple[Text, ...] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that make up this share."""
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """Sample from so many likeliest tokens; 0 or -1: from all."""
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is, as with max_tokens; the server may have a bound of its own."""


class MessageTokensCount(TypedDict):
    input_tokens: int


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class MessageUsage(TypedDict):
    """The prompt's tokens are those of `input_tokens` and those that the cache had."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
"""max_tokens also where the time is over."""


class Stop(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None
    """The one of stop_sequences that ended the answer."""


class Message(Stop):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


class MessageStartEvent(TypedDict):
    type: Literal["message_start"]
    message: Message


class ContentBlockStartEvent(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class InputJSONDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


Delta = Annotated[TextDelta | ThinkingDelta | InputJSONDelta, Field(discriminator="type")]


class ContentBlockDeltaEvent(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: Delta


class ContentBlockStopEvent(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDeltaEvent(TypedDict):
    type: Literal["message_delta"]
    delta: Stop
    usage: MessageUsage


class MessageStopEvent(TypedDict):
    type: Literal["message_stop"]


Event = TypeAliasType(
    "Event",
    Annotated[
        MessageStartEvent
        | ContentBlockStartEvent
        | ContentBlockDeltaEvent
        | ContentBlockStopEvent
        | MessageDeltaEvent
        | MessageStopEvent,
        Field(discriminator="type"),
    ],
)
