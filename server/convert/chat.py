"""Messages of OpenAI's form to those that chat templates expect."""

from typing import Any

from configs.errors import InvalidRequest, shown
from server.convert.tool_input import arguments_in_history
from server.convert.tool_results import TEXTS, result_text


def chat_messages(messages: list[dict[str, Any]], passed_over: list[str]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string, arguments of tool calls an object.

    What tools gave and cannot be read is added to `passed_over`. Raises `InvalidRequest` naming the message.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    return [_chat_message(message, f"messages[{index}]", passed_over) for index, message in enumerate(messages)]


def _chat_message(given: dict[str, Any], where: str, passed_over: list[str]) -> dict[str, Any]:
    message = _without_older_names(given)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a string; got {shown(role)}", param="messages")
    if not isinstance(message.get("tool_call_id"), str | None):
        raise InvalidRequest(f"{where}.tool_call_id must be a string", param="messages")
    if role == "tool":
        content = result_text(message.get("content"), f"{where}.content", "messages", passed_over)
    else:
        content = _content(message, where)
    converted = {**message, "content": content}
    if message.get("tool_calls") not in (None, []):
        converted["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    else:
        converted.pop("tool_calls", None)
    return converted


def _without_older_names(message: dict[str, Any]) -> dict[str, Any]:
    """A function's call and its result as a tool's."""
    if message.get("role") == "function":
        message = {**message, "role": "tool"}
    if "function_call" not in message:
        return message
    plain = {name: value for name, value in message.items() if name != "function_call"}
    if message["function_call"] is None:
        return plain
    return {"tool_calls": [{"type": "function", "function": message["function_call"]}], **plain}


def _content(message: dict[str, Any], where: str) -> str:
    """Text parts are joined by line breaks; only assistants may say nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return str(message.get("refusal") or "")
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of text parts", param="messages")
    return "\n".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if kind in (*TEXTS, "refusal") else None
    if not isinstance(text, str):
        message = f"{where}: parts of type {shown(kind)} are not supported; only text with a string"
        raise InvalidRequest(message, param="messages")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI sends a call's arguments as JSON text; chat templates print an object."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", param="messages")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, dict) and call.get("type") == "custom" and isinstance(custom := call.get("custom"), dict):
        # its input is any text
        given = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        call = {"id": call.get("id"), "type": "function", "function": given}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _names_function(call):
        raise InvalidRequest(f"{where} must be a call with a function that has a name", param="messages")
    arguments = arguments_in_history(function.get("arguments"), f"{where}.function.arguments", "messages")
    return {**call, "function": {**function, "arguments": arguments}}


def _names_function(call: dict[str, Any]) -> bool:
    is_function = call.get("type", "function") == "function" and isinstance(call.get("id"), str | None)
    return is_function and isinstance(call["function"].get("name"), str)
