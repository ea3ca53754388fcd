"""Requests of Anthropic's Messages API, under the names that its Python package has for them, and the `Chat` that each
asks for.

Every block becomes a message of its own, and neighbours of the same role are then joined; so turns that follow each
other with one role are one turn, as the API has it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from configs.errors import InvalidRequest, shown
from configs.settings import ServerConfig
from server.bodies import Hint, ModelRequest
from server.chat import Chat
from server.openai.base import Timeout
from server.openai.messages import type_of
from server.sampling import Text, stop_strings
from server.structured import CLOSED, json_schema
from server.tools import arguments_in_history, offered, result_text, tool_choice

_ID = "toolu_"
"""What ids of tool uses begin with."""
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
    kind = type_of(block)
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
    kind = type_of(tool)
    return "server_tool" if isinstance(kind, str) and kind != "custom" else "custom"


ToolUnionParam = Annotated[
    Annotated[ToolParam, Tag("custom")] | Annotated[ServerToolParam, Tag("server_tool")], Discriminator(_tool_type)
]


@CLOSED
class ToolChoice(TypedDict):
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str | None]
    """Of the tool that has to be used, with type `tool`."""
    disable_parallel_tool_use: NotRequired[bool | None]
    """True: at most one tool use."""


@CLOSED
class ThinkingConfig(TypedDict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: NotRequired[Annotated[int, Field(ge=1, lt=2**63)] | None]
    """Most tokens of the thinking; then its end is forced."""
    display: NotRequired[Literal["summarized", "omitted"] | None]
    """omitted leaves the reasoning out of the answer; otherwise all of it is there."""


@CLOSED
class OutputFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@CLOSED
class OutputConfig(TypedDict, total=False):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None
    """For the chat template, as `reasoning_effort`."""
    format: OutputFormat | None
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


def chat_of(body: CountTokensRequest, config: ServerConfig) -> Chat:
    """The chat that the request asks for. Raises `InvalidRequest` naming the field."""
    passed_over: list[str] = []
    messages = conversation(body, passed_over)
    tools = offered(body.tools, passed_over, _function, types=(None, "custom"))
    choice, tools = tool_choice(_openai_choice(body.tool_choice), tools)
    form = (body.output_config or {}).get("format")
    if form and body.output_format:
        raise InvalidRequest("output_config.format and output_format exclude each other", param="output_format")
    form = form or body.output_format
    structured = json_schema(form["schema"]) if form else None
    sampling = _sampling(body, config) if isinstance(body, MessagesRequest) else {}
    return Chat(
        messages=messages,
        sampling={**sampling, "structured": structured},
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.get("disable_parallel_tool_use")),
        template_kwargs=_template_kwargs(body, messages[-1]),
        field_names={"prompt": "messages", "structured": "output_format" if body.output_format else "output_config"},
        thinking_token_budget=body.thinking.get("budget_tokens") if body.thinking else None,
        fit_max_tokens=True,
        timeout=body.timeout_s if isinstance(body, MessagesRequest) else None,
        passed_over=passed_over,
    )


def _sampling(body: MessagesRequest, config: ServerConfig) -> dict[str, Any]:
    """The given fields of `SamplingParams`. Raises `InvalidRequest`."""
    given = {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    stop = stop_strings(body.stop_sequences, config, "stop_sequences")
    return {name: value for name, value in given.items() if value is not None} | {"stop": stop}


def conversation(body: CountTokensRequest, passed_over: list[str]) -> list[dict[str, Any]]:
    """Messages as templates expect them; what they leave out is added to `passed_over`.

    Raises `InvalidRequest` naming the block.
    """
    messages: list[Any] = body.messages
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    names = {block["id"]: block["name"] for blocks in contents for block in blocks if block["type"] == "tool_use"}
    turns = [*_turns("system", body.system, "system", names, passed_over)] if body.system else []
    for index, message in enumerate(messages):
        turns += _turns(message["role"], message["content"], f"messages[{index}].content", names, passed_over)
    if not turns:
        raise InvalidRequest("messages is empty", param="messages")
    return [*_joined(turns)]


def _turns(
    role: str, content: str | list[Any], where: str, names: dict[str, str], passed_over: list[str]
) -> Iterator[dict[str, Any]]:
    """A message for each block; `names` are those of tools, by the ids of their calls. Raises `InvalidRequest`."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match role, block["type"]:
            case _, "text":
                yield {"role": role, "content": block["text"]}
            case "assistant", "thinking":
                yield {"role": role, "content": "", "reasoning_content": block["thinking"]}
            case "assistant", "redacted_thinking":
                pass
            case "assistant", "tool_use":
                arguments = arguments_in_history(block.get("input"), f"{place}.input", "messages")
                function = {"name": block["name"], "arguments": arguments}
                call = {"id": block["id"].removeprefix(_ID), "type": "function", "function": function}
                yield {"role": role, "content": "", "tool_calls": [call]}
            case "user", "tool_result":
                use_id = block["tool_use_id"]
                if use_id not in names:
                    raise InvalidRequest(f"{place}: no tool_use has the id {shown(use_id)}", param="messages")
                text = result_text(block.get("content"), f"{place}.content", "messages", passed_over)
                text = f"Error: {text}" if block.get("is_error") else text
                yield {"role": "tool", "content": text, "tool_call_id": use_id.removeprefix(_ID), "name": names[use_id]}
            case _, "thinking" | "redacted_thinking" | "tool_use" | "tool_result" as kind:
                raise InvalidRequest(f"{place}: messages of role {role} hold no {kind}", param="messages")
            case _, kind:
                passed_over.append(f"{place} {kind}")


def tool_use_id(call_id: str) -> str:
    """The id of a tool use: the model's own, whose form its template may insist on, behind `toolu_`."""
    return _ID + call_id.removeprefix("call_")


def _joined(turns: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The turns with neighbours of one role as one message; results of tools stay apart."""
    for role, neighbours in groupby(turns, lambda turn: turn["role"]):
        if role == "tool":
            yield from neighbours
            continue
        parts = [*neighbours]
        message = {"role": role, "content": "\n".join(part["content"] for part in parts if part["content"])}
        if reasoning := "".join(part.get("reasoning_content", "") for part in parts):
            message["reasoning_content"] = reasoning
        if calls := [call for part in parts for call in part.get("tool_calls", ())]:
            message["tool_calls"] = calls
        yield message


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The tool as templates print it."""
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": {**function, "strict": True} if tool.get("strict") else function}


def _openai_choice(choice: ToolChoice | None) -> Any:
    kind, name = (choice["type"], choice.get("name")) if choice else ("auto", None)
    return {"any": "required", "tool": {"type": "function", "name": name}}.get(kind, kind)


def _template_kwargs(body: CountTokensRequest, last: dict[str, Any]) -> dict[str, Any]:
    """Variables of the template for a chat that ends with the message `last`. Raises `InvalidRequest`."""
    is_continued = last["role"] == "assistant"
    if is_continued and "tool_calls" in last:
        raise InvalidRequest("a tool_use needs a tool_result behind it", param="messages")
    kwargs: dict[str, Any] = {"add_generation_prompt": not is_continued, "continue_final_message": is_continued}
    if body.thinking:
        kwargs["enable_thinking"] = body.thinking["type"] != "disabled"
    if effort := (body.output_config or {}).get("effort"):
        kwargs["reasoning_effort"] = effort
    return kwargs
