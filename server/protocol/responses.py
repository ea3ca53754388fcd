"""POST /v1/responses: the request, and the response as it grows."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from server.protocol.common import Int64, SamplingFields, Timeout
from server.protocol.response_items import FunctionTool, NamespaceTool, OutputItem
from server.protocol.unsupported import HINTS

Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
INCLUDABLE = frozenset(
    {
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "message.input_image.image_url",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""Only logprobs add anything here: reasoning items hold their text in the open, the others are about items that
cannot come."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Only false is honoured: events are not padded."""


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For the chat template; `none` also tells it not to open a reasoning part."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Nothing here summarises, so this gives none: the reasoning itself is in the answer."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name."""
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    """{"type": "text" | "json_object"}, or {"type": "json_schema", "name", "schema"}."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """A hint that no template knows."""


class ResponsesRequest(SamplingFields, kw_only=True):
    """OpenAI's fields, and those of `SamplingFields` that ask for one answer."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background_options": ({}, {"completion_window": "soonest"}),
        "conversation": (),
        "image": ({}, {"context_compression": "disabled"}, {"context_compression": "auto"}),
        "moderation": (),
        "prompt": (),
    }
    hints: ClassVar[Mapping[str, tuple[Any, ...]]] = HINTS | {"context_management": ([],)}

    input: str | list[dict[str, Any]]
    """A user's message, or items; see `protocol/response_items.py`."""
    model: str | None = None
    """The served name; left out, the served model answers."""
    instructions: str | None = None
    """A system message in front; not inherited from the previous response."""
    previous_response_id: str | None = None
    """The stored response that this one continues."""
    store: bool | None = None
    """Whether the response can be asked for later and continued (default true)."""
    background: bool | None = None
    """Answer at once, and go on whether or not the client stays."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = None
    max_output_tokens: Int64 | None = None
    max_tool_calls: Int64 | None = None
    """Bounds OpenAI's own tools, of which there are none here."""
    top_logprobs: Int64 | None = None
    """With `include` of message.output_text.logprobs."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """auto, none, required, {"type": "function", "name": …}, or {"type": "allowed_tools", "mode", "tools"}."""
    parallel_tool_calls: bool | None = None
    """False: at most one tool call."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: what is oldest in a conversation that is longer than the context is left out."""
    metadata: Metadata | None = None
    """This and the three below are labels: they come back with the response."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: Int64 | None = None
    """Lower runs first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is; the server may have a bound of its own."""


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """OpenAI bills these; here all that is computed may be found again."""


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    """server_error or invalid_prompt."""
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str
    """max_output_tokens, or timeout."""


class TextEcho(msgspec.Struct, frozen=True):
    format: dict[str, Any]
    verbosity: str = "medium"


class ReasoningEcho(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. What the request left out shows the value that was used."""

    id: str
    object: str = "response"
    created_at: int
    """This and `completed_at`: Unix seconds."""
    completed_at: int | None = None
    status: str
    """queued, in_progress, completed, incomplete, failed or cancelled."""
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool | NamespaceTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")


class InputTokens(msgspec.Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True
