"""The Responses API in types: items, tools, the request and the response."""

import uuid
from typing import Annotated, Any, Literal, NotRequired, get_args

from pydantic import Discriminator, Field, Tag, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from typing_extensions import TypedDict

from server.bodies import Hint, ModelRequest, Unsupported, invalid_request
from server.openai.base import Priority, Timeout
from server.openai.messages import RefusalPart, ToolChoice, type_of
from server.sampling import NumLogprobs, SamplingFields
from server.structured import CLOSED, OPEN, PlainFormat

Status = Literal["in_progress", "completed", "incomplete"]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def new_id(kind: str) -> str:
    """A random id for an item of this type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def _any_of(schema: dict[str, Any]) -> None:
    """Make `oneOf` of a schema `anyOf`: a type that is left out, or has but a pattern, may fit several branches."""
    schema["anyOf"] = schema.pop("oneOf")


class TextPart(TypedDict):
    """Of messages and results of calls: `input_text` of users and tools, `output_text` of the model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[Any] | None]
    """As in /v1/chat/completions: an object for each token."""


class ReasoningPart(TypedDict):
    type: NotRequired[Literal["reasoning_text", "summary_text"]]
    text: str


class _Item(TypedDict):
    id: NotRequired[str | None]
    """Null, or left out, only in what clients send; the status too."""
    status: NotRequired[Status | None]


class MessageItem(_Item):
    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]
    """A string only in what clients send."""


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: NotRequired[list[ReasoningPart]]
    content: NotRequired[list[ReasoningPart] | None]
    encrypted_content: NotRequired[str | None]
    """Another server's; nothing here can read it."""


class FunctionCallItem(_Item):
    """A call of a function, or of a custom tool, whose input is any text."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    """Names the call in its output."""
    name: str
    namespace: NotRequired[str | None]
    """The namespace that has the function."""
    arguments: NotRequired[Any]
    """JSON of an object, or whatever a model wrote."""
    input: NotRequired[Any]
    """A custom tool has this instead of arguments."""


class ClientToolCall(TypedDict):
    """A call of one of OpenAI's tools that clients run, such as `local_shell_call`: its other keys are arguments."""

    type: Annotated[str, Field(pattern="_call$")]
    id: NotRequired[str | None]
    call_id: str


class CallOutput(TypedDict):
    """What a call of whatever kind gave, such as `function_call_output`."""

    type: Annotated[str, Field(pattern="_output$")]
    id: NotRequired[str | None]
    call_id: NotRequired[str | None]
    """Names the call; without it, the call is the one with this item's id."""
    output: Any
    """A text, or parts. Parts that are no text leave a word in their place."""


class ItemReference(TypedDict):
    """Stands for an item of a stored response."""

    type: NotRequired[Literal["item_reference"] | None]
    id: str


class ServerItem(TypedDict):
    """What OpenAI's servers ran, or only they can read: passed over, and named in the answer's header."""

    type: Literal[
        "code_interpreter_call", "file_search_call", "image_generation_call", "web_search_call", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "mcp_list_tools", "compaction", "compaction_summary", "compaction_trigger",
        "context_compaction", "program", "program_output",
    ]  # fmt: skip


_OF_SERVER = frozenset(get_args(ServerItem.__annotations__["type"]))


def item_kind(item: Any) -> str:
    """The tag of the item in `InputItem`: its type, or what several types have in common."""
    given = type_of(item)
    if given is None:
        return "message" if not isinstance(item, dict) or "role" in item else "item_reference"
    kind = str(given)
    if kind in _OF_SERVER or kind.endswith("_output"):
        return "server" if kind in _OF_SERVER else "output"
    if kind in ("function_call", "custom_tool_call"):
        return "function_call"
    return "client_call" if kind.endswith("_call") and isinstance(item.get("call_id"), str) else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[ClientToolCall, Tag("client_call")]
    | Annotated[CallOutput, Tag("output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ServerItem, Tag("server")],
    Discriminator(item_kind),
    Field(json_schema_extra=_any_of),
]
OutputItem = MessageItem | ReasoningItem | FunctionCallItem
Item = OutputItem | CallOutput


class FunctionTool(TypedDict):
    type: NotRequired[Literal["function"] | None]
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    """A JSON schema."""
    strict: NotRequired[bool | None]


class OtherTool(TypedDict):
    """Of OpenAI's own servers: passed over, and named in the answer's header."""

    type: Annotated[str, Field(json_schema_extra={"not": {"enum": ["function", "namespace"]}})]


def _kind_of_tool(given: Any) -> str:
    kind = type_of(given)
    if isinstance(kind, str) and kind not in ("function", "namespace"):
        return "other"
    return "function" if kind is None else str(kind)


_Function = Annotated[FunctionTool, Tag("function")]
_Other = Annotated[OtherTool, Tag("other")]


class NamespaceTool(TypedDict):
    """A group of functions. Calls of them name it beside the function."""

    type: Literal["namespace"]
    name: str
    description: NotRequired[str | None]
    tools: list[Annotated[_Function | _Other | Annotated[OtherTool, Tag("namespace")], Discriminator(_kind_of_tool)]]


Tool = Annotated[_Function | _Other | Annotated[NamespaceTool, Tag("namespace")], Discriminator(_kind_of_tool)]


@OPEN
class SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    name: str
    schema: dict[str, Any]


def _naming_the_format(given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(given)
    except ValidationError as error:
        refused = invalid_request(error)
        refused.param = "text.format"
        raise refused from None


Format = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


@CLOSED
class TextOptions(TypedDict, total=False):
    format: Annotated[Format | None, WrapValidator(_naming_the_format)]
    verbosity: Literal["low", "medium", "high"] | None
    """A hint that no template knows."""


@CLOSED
class ReasoningOptions(TypedDict, total=False):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    """For the chat template; `none` also tells it not to open a reasoning part."""
    summary: Literal["auto", "concise", "detailed"] | None
    """Nothing here summarises, so this gives none: the reasoning itself is in the answer."""
    generate_summary: Literal["auto", "concise", "detailed"] | None
    """The older name of `summary`."""
    context: Literal["auto"] | None
    mode: Literal["standard"] | None


@CLOSED
class ResponseStreamOptions(TypedDict):
    include_obfuscation: NotRequired[Literal[False] | None]
    """Only false is honoured: events are not padded."""


Includable = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ResponsesRequest(SamplingFields, ModelRequest):
    """OpenAI's fields, and those of how one answer is decoded."""

    input: str | list[InputItem]
    """A user's message, or items."""
    instructions: str | None = None
    """A system message in front; not inherited from the previous response."""
    previous_response_id: str | None = None
    """The stored response that this one continues."""
    store: bool | None = None
    """Whether the response can be asked for later and continued (default true)."""
    background: bool | None = None
    """Answer at once, and go on whether or not the client stays."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Includable] | None = None
    """Only logprobs add anything: reasoning items hold their text in the open, the others cannot come."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    max_tool_calls: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Bounds OpenAI's own tools, of which there are none here."""
    top_logprobs: NumLogprobs | None = None
    """With `include` of message.output_text.logprobs."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one tool call."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: what is oldest in a conversation that is longer than the context is left out."""
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None
    """A label that comes back with the response, as the three below do."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    priority: Priority | None = None
    """Lower runs first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is; the server may have a bound of its own."""

    n: Annotated[Any, Unsupported((1,))] = None
    max_tokens: Annotated[Any, Unsupported()] = None
    prompt_logprobs: Annotated[Any, Unsupported()] = None
    use_beam_search: Annotated[Any, Unsupported((False,))] = None
    length_penalty: Annotated[Any, Unsupported()] = None
    access_programs: Annotated[Any, Unsupported()] = None
    background_options: Annotated[Any, Unsupported(({}, {"completion_window": "soonest"}))] = None
    conversation: Annotated[Any, Unsupported()] = None
    image: Annotated[Any, Unsupported(({}, {"context_compression": "disabled"}, {"context_compression": "auto"}))] = (
        None
    )
    moderation: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    context_management: Annotated[Any, Hint(([],))] = None
    prediction: Annotated[Any, Hint()] = None
    prompt_cache_options: Annotated[Any, Hint(({}, {"mode": "implicit"}))] = None
    prompt_cache_retention: Annotated[Any, Hint()] = None
    service_tier: Annotated[Any, Hint(("auto", "default"))] = None
    verbosity: Annotated[Any, Hint(("medium",))] = None


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens", "timeout"]


@OPEN
class ResponseObject(TypedDict):
    """A response as it is at the moment. What the request left out shows the value that was used."""

    id: str
    object: Literal["response"]
    created_at: int
    """Unix seconds."""
    completed_at: int | None
    """Unix seconds."""
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: ToolChoice
    tools: list[FunctionTool | NamespaceTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
