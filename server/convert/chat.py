"""From the fields of /v1/chat/completions to a `Chat`."""

from typing import Any

from configs.errors import InvalidRequest, shown
from configs.sampling import MAX_LOGPROBS
from configs.settings import ServerConfig
from server.chat import Chat
from server.convert.sampling import beam_length_penalty, given_sampling
from server.convert.structured import field_names
from server.convert.tool_input import arguments_in_history
from server.convert.tool_results import TEXTS, result_text
from server.convert.tools import offered, tool_choice, tool_of
from server.field_names import naming
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
    passed_over: list[str] = []
    choice, tools = _tools(body, passed_over)
    sampling = given_sampling(body, config)
    sampling["logprobs"] = _num_logprobs(body)
    return Chat(
        messages=chat_messages(body.messages, passed_over),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False and not body.functions,
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
        passed_over=passed_over,
    )


def chat_messages(messages: list[dict[str, Any]], passed_over: list[str]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string, arguments of tool calls an object.

    What tools gave and cannot be read is added to `passed_over`. Raises `InvalidRequest` naming the message.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    return [_chat_message(message, f"messages[{index}]", passed_over) for index, message in enumerate(messages)]


def _tools(body: ChatRequest, passed_over: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """The choice and the tools; `functions` are tools under their older name, of which a choice calls one."""
    for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, older) and getattr(body, newer):
            raise InvalidRequest(f"{older} and {newer} exclude each other", param=older)
    functions = [{"type": "function", "function": function} for function in body.functions or ()]
    named: Any = body.function_call
    if isinstance(named, dict):
        named = {"type": "function", "function": named}
    with naming({"tools": "functions", "tool_choice": "function_call"} if functions or named else {}):
        tools = offered(body.tools or functions, tool_of, passed_over, where="functions" if functions else "tools")
        return tool_choice(body.tool_choice or named, tools)


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
