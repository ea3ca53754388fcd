"""Messages and tools of chats as OpenAI has them, and as chat templates take them.

They are as strict as the body that holds them, and take other keys as it does.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from server.sampling import Text
from server.tools import arguments_in_history, result_text


class ChatTextPart(TypedDict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


Content = str | list[Annotated[ChatTextPart | RefusalPart, Field(discriminator="type")]]


class CalledFunction(TypedDict):
    name: str
    arguments: NotRequired[Any]
    """JSON of an object, or whatever a model wrote."""


class FunctionCall(TypedDict):
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class CalledTool(TypedDict):
    name: str
    input: NotRequired[Any]


class CustomCall(TypedDict):
    """A call whose input is any text."""

    id: NotRequired[str | None]
    type: Literal["custom"]
    custom: CalledTool


def type_of(given: Any) -> Any:
    return given.get("type") if isinstance(given, dict) else None


ToolCall = Annotated[
    Annotated[FunctionCall, Tag("function")] | Annotated[CustomCall, Tag("custom")],
    Discriminator(lambda given: "custom" if type_of(given) == "custom" else "function"),
]


class _Message(TypedDict, total=False):
    """What every message may have, beside other keys that a template knows."""

    tool_calls: list[ToolCall] | None
    function_call: CalledFunction | None
    """The older form of a call."""
    tool_call_id: str | None


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: NotRequired[Content | None]
    refusal: NotRequired[Any]


class ToolMessage(_Message):
    role: Literal["tool", "function"]
    content: NotRequired[str | list[dict[str, Any]] | None]
    """Parts that are no text leave a word in their place."""


class ChatMessage(_Message):
    """Of users and systems, and of whatever roles a template knows."""

    role: Annotated[Text, Field(json_schema_extra={"not": {"enum": ["assistant", "tool", "function"]}})]
    content: Content


def _kind_of_message(given: Any) -> str:
    role = str(given.get("role")) if isinstance(given, dict) else ""
    return {"assistant": "assistant", "tool": "tool", "function": "tool"}.get(role, "other")


Message = Annotated[
    Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")]
    | Annotated[ChatMessage, Tag("other")],
    Discriminator(_kind_of_message),
]
Messages = Annotated[list[Message], Field(min_length=1)]


class FunctionName(TypedDict):
    name: Text


class Function(FunctionName):
    description: NotRequired[Any]
    parameters: NotRequired[dict[str, Any] | None]
    """A JSON schema."""


class ChatFunctionTool(TypedDict):
    type: Literal["function"]
    function: Function


class ChatOtherTool(TypedDict):
    """Of OpenAI's own servers: passed over, and named in the answer's header."""

    type: Annotated[str, Field(json_schema_extra={"not": {"const": "function"}})]


Tool = Annotated[
    Annotated[ChatFunctionTool, Tag("function")] | Annotated[ChatOtherTool, Tag("other")],
    Discriminator(lambda given: "function" if type_of(given) in (None, "function") else "other"),
]


class NamedFunction(TypedDict):
    """The name stands in `function`, or beside the type, as OpenAI's Responses API has it."""

    type: Literal["function"]
    function: NotRequired[FunctionName | None]
    name: NotRequired[Text]


class AllowedTools(TypedDict):
    """With a mode, auto or required, and the tools that may be called."""

    type: Literal["allowed_tools"]


ToolChoice = Literal["auto", "none", "required"] | Annotated[NamedFunction | AllowedTools, Field(discriminator="type")]


def template_messages(messages: list[Any], passed_over: list[str]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string, arguments of tool calls an object.

    What tools gave and cannot be read is added to `passed_over`. Raises `InvalidRequest` naming the message.
    """
    return [_template_message(message, f"messages[{index}]", passed_over) for index, message in enumerate(messages)]


def _template_message(given: dict[str, Any], where: str, passed_over: list[str]) -> dict[str, Any]:
    """One of the `template_messages`. The older names, of a function's call and of its result, become a tool's."""
    message = {name: value for name, value in given.items() if name not in ("tool_calls", "function_call")}
    message["role"] = "tool" if given["role"] == "function" else given["role"]
    if message["role"] == "tool":
        message["content"] = result_text(given.get("content"), f"{where}.content", "messages", passed_over)
    else:
        message["content"] = _content(given)
    older = given.get("function_call")
    if calls := given.get("tool_calls", older and [{"type": "function", "function": older}]):
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return message


def _content(message: dict[str, Any]) -> str:
    """The text of a message; parts are joined by line breaks. Only assistants may say nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return str(message.get("refusal") or "")
    return "\n".join(map(part_text, content))


def part_text(part: Any) -> str:
    """The text of a part of a message, or what it says in refusing."""
    text: str = part["refusal" if part["type"] == "refusal" else "text"]
    return text


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """OpenAI sends a call's arguments as JSON text; chat templates print an object."""
    if call.get("type") == "custom":
        given = {"name": call["custom"]["name"], "arguments": {"input": call["custom"].get("input")}}
        call = {"id": call.get("id"), "type": "function", "function": given}
    function = call["function"]
    arguments = arguments_in_history(function.get("arguments"), f"{where}.function.arguments", "messages")
    return {**call, "function": {**function, "arguments": arguments}}
