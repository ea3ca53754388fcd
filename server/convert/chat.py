"""From the fields of /v1/chat/completions to a `Chat`."""

import json
from typing import Any

from configs.errors import InvalidRequest, shown
from configs.sampling import MAX_LOGPROBS
from configs.settings import ServerConfig
from server.chat import Chat
from server.convert.sampling import beam_length_penalty, given_sampling
from server.convert.structured import field_names
from server.protocol.chat import ChatRequest

RESERVED_TEMPLATE_KWARGS = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}


def chat_of(body: ChatRequest, config: ServerConfig) -> Chat:
    """Raises `InvalidRequest` naming the field."""
    if body.chat_template is not None and not config.trust_request_chat_template:
        message = "chat_template in requests needs a server with --trust-request-chat-template"
        raise InvalidRequest(message, param="chat_template")
    if body.echo and not body.continue_final_message:
        raise InvalidRequest("echo of a chat needs continue_final_message", param="echo")
    tools = [tool_of(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])]
    sampling = given_sampling(body, config)
    sampling["logprobs"] = _num_logprobs(body)
    return Chat(
        messages=chat_messages(body.messages),
        tools=tools,
        tool_choice=tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        chat_template=body.chat_template,
        template_kwargs=_template_kwargs(body),
        sampling=sampling,
        field_names={"prompt": "messages", **field_names(body)},
        beam_length_penalty=beam_length_penalty(body, body.stream),
        thinking_token_budget=None if body.thinking_token_budget == -1 else body.thinking_token_budget,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        request_id=body.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=body.timeout_s,
    )


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string, arguments of tool calls an object.

    Raises `InvalidRequest` naming the message.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    continued = bool(body.continue_final_message)
    opened = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    if continued and opened:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise InvalidRequest(message, param="continue_final_message")
    extra = body.chat_template_kwargs or {}
    for name in extra.keys() & RESERVED_TEMPLATE_KWARGS:
        raise InvalidRequest(f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        extra = {"enable_thinking": body.reasoning_effort != "none", "reasoning_effort": body.reasoning_effort, **extra}
    if body.documents:
        extra = {**extra, "documents": body.documents}
    return {**extra, "add_generation_prompt": opened, "continue_final_message": continued}


def _num_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}; got {top}"
        raise InvalidRequest(message, param="top_logprobs")
    return top or 0 if body.logprobs else None


def tool_of(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function as templates print it."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        message = f"{where}: only tools of type function are supported, with a function; got {shown(tool.get('type'))}"
        raise InvalidRequest(message, param="tools")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}.function.name must be a string", param="tools")
    if not isinstance(function.get("parameters"), dict | None):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema", param="tools")
    return tool


def tool_choice(choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]) -> str:
    """auto, none, required, or `=` and the name of a function."""
    if choice is None:
        return "auto"
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if choice.get("type") != "function" or name not in names:
            raise InvalidRequest(f"tool_choice names no function of tools: {shown(name)}", param="tool_choice")
        return f"={name}"
    if choice not in ("auto", "none", "required"):
        raise InvalidRequest(
            f"tool_choice must be auto, none, required or a function; got {shown(choice)}", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice required needs tools", param="tool_choice")
    return choice


def _chat_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a string; got {shown(role)}", param="messages")
    converted = {**message, "content": _content(message, where)}
    if message.get("tool_calls") not in (None, []):
        converted["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    else:
        converted.pop("tool_calls", None)
    return converted


def _content(message: dict[str, Any], where: str) -> str:
    """Text parts are joined by line breaks; only an assistant's tool calls need no content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", param="messages")
    return "\n".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind in ("text", "input_text") else None
    if not isinstance(text, str):
        message = f"{where}: parts of type {shown(kind)} are not supported; only text with a string"
        raise InvalidRequest(message, param="messages")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI sends a call's arguments as JSON text; chat templates print an object."""
    converted = []
    try:
        if not isinstance(calls, list):
            raise TypeError(calls)
        for call in calls:
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            if not isinstance(arguments, dict | None) or not _names_function(call):
                raise TypeError(call)
            converted.append({**call, "function": {**call["function"], "arguments": arguments or {}}})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        message = f"{where} must be a list of calls with a function, its name and an object of arguments as JSON"
        raise InvalidRequest(message, param="messages") from error
    return converted


def _names_function(call: dict[str, Any]) -> bool:
    is_function = call.get("type", "function") == "function" and isinstance(call.get("id"), str | None)
    return is_function and isinstance(call["function"].get("name"), str)
