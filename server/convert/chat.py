"""From request fields to prompts and `SamplingParams`."""

import json
from typing import Any

import msgspec

from configs.errors import InvalidRequest
from configs.sampling import MAX_LOGPROBS, SamplingParams
from configs.settings import ServerConfig
from server.protocol.chat import ChatRequest
from server.protocol.common import GenerationRequest
from server.protocol.completions import CompletionRequest

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat answer may fill the context."""

SAME_NAME = {field.name for field in msgspec.structs.fields(SamplingParams)} & {
    field.name for field in msgspec.structs.fields(GenerationRequest)
} - {"max_tokens", "stop"}
"""Fields that mean the same in a request and in `SamplingParams`."""

RESERVED_TEMPLATE_KWARGS = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
}


def sampling_params(
    body: CompletionRequest | ChatRequest, defaults: dict[str, Any], config: ServerConfig
) -> SamplingParams:
    """The request's fields over the checkpoint's `defaults` over OpenAI's. Raises `InvalidRequest`.

    max_tokens stays None when the request leaves it out, see `fit_to_context`.
    """
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    usable = {name: value for name, value in defaults.items() if name in SAME_NAME}
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    _check_stop(stop, config)
    _check_stream_options(body)
    return SamplingParams(**usable | given, max_tokens=_max_tokens(body), stop=stop, logprobs=_num_logprobs(body))


def fit_to_context(
    params: SamplingParams, body: CompletionRequest | ChatRequest, num_prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """Fill in completions' default of max_tokens, clamped to the context; an explicit number is left alone."""
    if params.max_tokens is not None or isinstance(body, ChatRequest):
        return params
    room = max(1, max_model_len - num_prompt_tokens)
    return msgspec.structs.replace(params, max_tokens=min(COMPLETION_MAX_TOKENS, room))


def completion_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """One entry per prompt: a text or token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise InvalidRequest("prompt mixes texts, token ids and lists", param="prompt")
    return [prompt] if kinds == {int} else prompt  # type: ignore[list-item, return-value]


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string, arguments of tool calls an object.

    Raises `InvalidRequest` naming the message.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    return [_chat_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """Arguments of `encode_chat` beside the messages."""
    continued = bool(body.continue_final_message)
    opened = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    if continued and opened:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise InvalidRequest(message, param="continue_final_message")
    extra = body.chat_template_kwargs or {}
    for name in extra.keys() & RESERVED_TEMPLATE_KWARGS:
        raise InvalidRequest(f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    return {**extra, "add_generation_prompt": opened, "continue_final_message": continued}


def _max_tokens(body: GenerationRequest) -> int | None:
    newer = body.max_completion_tokens is not None
    name, value = ("max_completion_tokens", body.max_completion_tokens) if newer else ("max_tokens", body.max_tokens)
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} must be at least 1; got {value}", param=name)
    return value


def _num_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    top = body.top_logprobs
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}; got {top}"
        raise InvalidRequest(message, param="top_logprobs")
    return top or 0 if body.logprobs else None


def _check_stop(stop: tuple[str, ...], config: ServerConfig) -> None:
    if len(stop) > config.max_stop_strings:
        message = f"stop may hold {config.max_stop_strings} strings; got {len(stop)}"
        raise InvalidRequest(message, param="stop")
    longest = max(map(len, stop), default=0)
    if longest > config.max_stop_chars:
        message = f"a stop string may have {config.max_stop_chars} characters; got {longest}"
        raise InvalidRequest(message, param="stop")


def _check_stream_options(body: GenerationRequest) -> None:
    options = body.stream_options
    if options and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if options and options.include_obfuscation:
        raise InvalidRequest("include_obfuscation is not supported by this server", param="stream_options")


def _chat_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a string; got {role!r}", param="messages")
    converted = {**message, "content": _content(message, where)}
    if message.get("tool_calls"):
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
        message = f"{where}: parts of type {kind!r} are not supported; only text with a string"
        raise InvalidRequest(message, param="messages")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI sends a call's arguments as JSON text; chat templates print an object."""
    converted = []
    try:
        for call in calls:
            arguments = call["function"].get("arguments") or "{}"
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            converted.append({**call, "function": {**call["function"], "arguments": parsed}})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        message = f"{where} must be a list of calls with a function and JSON arguments"
        raise InvalidRequest(message, param="messages") from error
    return converted
