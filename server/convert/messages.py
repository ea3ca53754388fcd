"""From the fields of Anthropic's /v1/messages to a `Chat`.

Every block becomes a message of its own, and neighbours of the same role are then joined; so turns that follow each
other with one role are one turn, as the API has it.
"""

from collections.abc import Iterator
from typing import Any

from configs.errors import InvalidRequest, shown
from configs.sampling import StructuredOutput
from configs.settings import ServerConfig
from server.chat import Chat
from server.convert.tool_input import arguments_in_history
from server.convert.tool_results import result_text
from server.convert.tools import offered
from server.protocol.messages import CountTokensRequest, InputMessage, MessagesRequest
from server.sampling import check_stop
from server.structured import json_schema

BLOCKS_OF = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""Types of blocks by role."""
OF_SERVER_TOOLS = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload", "compaction")
"""Types of blocks for tools that the server runs, beside those that end with `_tool_result`."""
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")
"""Fields that mean the same in a request and in `SamplingParams`."""


def chat_of(body: CountTokensRequest, config: ServerConfig) -> Chat:
    """Raises `InvalidRequest` naming the field."""
    passed_over: list[str] = []
    messages = conversation(body, passed_over)
    tools = offered(body.tools, _tool, passed_over, types=(None, "custom"))
    choice = body.tool_choice
    structured = _structured(body)
    return Chat(
        messages=messages,
        sampling={**(_sampling(body, config) if isinstance(body, MessagesRequest) else {}), "structured": structured},
        tools=tools,
        tool_choice=_tool_choice(body, [tool["function"]["name"] for tool in tools]),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        template_kwargs=_template_kwargs(body, messages[-1]),
        field_names={
            "prompt": "messages",
            **({"structured": "output_format" if body.output_format else "output_config"} if structured else {}),
        },
        thinking_token_budget=body.thinking.budget_tokens if body.thinking else None,
        fit_max_tokens=True,
        timeout=body.timeout_s if isinstance(body, MessagesRequest) else None,
        passed_over=passed_over,
    )


def conversation(body: CountTokensRequest, passed_over: list[str]) -> list[dict[str, Any]]:
    """Messages as templates expect them; what they leave out is added to `passed_over`.

    Raises `InvalidRequest` naming the message and block.
    """
    names = dict(_names_of_calls(body.messages))
    turns: list[dict[str, Any]] = []
    if body.system:
        turns += _turns(InputMessage("system", body.system), "system", "system", names, passed_over)
    for index, message in enumerate(body.messages):
        turns += _turns(message, f"messages[{index}].content", "messages", names, passed_over)
    if not body.messages or not turns:
        raise InvalidRequest("messages is empty", param="messages")
    return _joined(turns)


def _turns(
    message: InputMessage, where: str, param: str, names: dict[str, str], passed_over: list[str]
) -> Iterator[dict[str, Any]]:
    blocks = message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
    for index, block in enumerate(blocks):
        reader = _Block(block, f"{where}[{index}]", param)
        kind = reader.type_of(BLOCKS_OF[message.role])
        if reader.is_of_server_tool:
            passed_over.append(f"{reader.where} {kind}")
        if kind == "text":
            yield {"role": message.role, "content": reader.text("text")}
        elif kind == "thinking":
            yield {"role": "assistant", "content": "", "reasoning_content": reader.text("thinking")}
        elif kind == "tool_use":
            yield {"role": "assistant", "content": "", "tool_calls": [_call(reader)]}
        elif kind == "tool_result":
            yield _result(reader, names, passed_over)


def tool_use_id(call_id: str) -> str:
    """As the API has them: the model's own id, whose form its template may insist on, behind `toolu_`."""
    return "toolu_" + call_id.removeprefix("call_")


def call_id(tool_use_id: str) -> str:
    return tool_use_id.removeprefix("toolu_")


def _call(block: "_Block") -> dict[str, Any]:
    arguments = arguments_in_history(block.value.get("input"), f"{block.where}.input", block.param)
    function = {"name": block.text("name"), "arguments": arguments}
    return {"id": call_id(block.text("id")), "type": "function", "function": function}


def _result(block: "_Block", names: dict[str, str], passed_over: list[str]) -> dict[str, Any]:
    use_id = block.text("tool_use_id")
    if use_id not in names:
        raise block.error(f"no tool_use has the id {shown(use_id)}")
    text = result_text(block.value.get("content"), f"{block.where}.content", block.param, passed_over)
    if block.value.get("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": call_id(use_id), "name": names[use_id]}


def _names_of_calls(messages: list[InputMessage]) -> Iterator[tuple[str, str]]:
    """Ids of the calls so far and the names of their tools; malformed blocks are told of elsewhere."""
    for message in messages:
        for block in message.content if isinstance(message.content, list) else []:
            if block.get("type") == "tool_use":
                yield str(block.get("id")), str(block.get("name"))


def _joined(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role as one message; results of tools stay apart."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        if not joined or turn["role"] == "tool" or joined[-1]["role"] != turn["role"]:
            joined.append(turn)
            continue
        last = joined[-1]
        last["content"] = "\n".join(filter(None, (last["content"], turn["content"])))
        for name in ("reasoning_content", "tool_calls"):
            if name in turn:
                last[name] = last[name] + turn[name] if name in last else turn[name]
    return joined


class _Block:
    """One content block of a request; errors name it."""

    def __init__(self, value: Any, where: str, param: str) -> None:
        self.value = value
        self.where = where
        self.param = param

    def type_of(self, allowed: tuple[str, ...]) -> str:
        kind = self.value.get("type") if isinstance(self.value, dict) else type(self.value).__name__
        if kind not in allowed and not self.is_of_server_tool:
            raise self.error(f"blocks of type {shown(kind)} are not supported here, only {', '.join(allowed)}")
        return str(kind)

    @property
    def is_of_server_tool(self) -> bool:
        """Whether only Anthropic's own server writes and reads it."""
        kind = str(self.value.get("type")) if isinstance(self.value, dict) else ""
        return kind in OF_SERVER_TOOLS or kind.endswith("_tool_result")

    def text(self, name: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str):
            raise self.error(f"{name} must be a string")
        return value

    def error(self, message: str) -> InvalidRequest:
        return InvalidRequest(f"{self.where}: {message}", param=self.param)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function as templates print it."""
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequest(f"{where}.name must be a string", param="tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequest(f"{where}.input_schema must be a JSON schema", param="tools")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(body: CountTokensRequest, names: list[str]) -> str:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return "auto"
    if choice.type == "none":
        return "none"
    if choice.type == "tool":
        if choice.name not in names:
            raise InvalidRequest(f"tool_choice names no tool of tools: {shown(choice.name)}", param="tool_choice")
        return f"={choice.name}"
    if not names:
        raise InvalidRequest("tool_choice any needs tools", param="tool_choice")
    return "required"


def _sampling(body: MessagesRequest, config: ServerConfig) -> dict[str, Any]:
    if body.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1; got {body.max_tokens}", param="max_tokens")
    stop = body.stop_sequences or ()
    if not all(stop):
        raise InvalidRequest("stop_sequences may not hold empty texts", param="stop_sequences")
    check_stop(stop, config, "stop_sequences")
    given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    return {**given, "stop": stop}


def _structured(body: CountTokensRequest) -> StructuredOutput | None:
    config = body.output_config
    if config and config.format and body.output_format:
        raise InvalidRequest("output_config.format and output_format exclude each other", param="output_format")
    form = (config and config.format) or body.output_format
    return json_schema(form.schema) if form else None


def _template_kwargs(body: CountTokensRequest, last: dict[str, Any]) -> dict[str, Any]:
    continued = last["role"] == "assistant"
    if continued and "tool_calls" in last:
        raise InvalidRequest("a tool_use needs a tool_result behind it", param="messages")
    kwargs: dict[str, Any] = {"add_generation_prompt": not continued, "continue_final_message": continued}
    if thinking := body.thinking:
        if thinking.budget_tokens is not None and thinking.budget_tokens < 1:
            raise InvalidRequest("thinking.budget_tokens must be at least 1", param="thinking")
        kwargs["enable_thinking"] = thinking.type != "disabled"
    if body.output_config and body.output_config.effort:
        kwargs["reasoning_effort"] = body.output_config.effort
    return kwargs
