"""From the fields of Ollama's /api/chat and /api/generate to what the engine takes."""

from typing import Any

import msgspec

from configs.errors import InvalidRequest, shown
from configs.sampling import MAX_LOGPROBS, StructuredOutput
from configs.settings import ServerConfig
from server.chat import Chat
from server.convert.chat import chat_messages, tool_of
from server.convert.sampling import check_stop, sampling_params
from server.convert.structured import json_schema
from server.parsing import validation_message
from server.protocol.ollama import (
    OPTIONS_WITHOUT_EFFECT,
    UNSUPPORTED_OPTIONS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    Options,
)
from server.serving import Serving

SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
"""Options that mean the same in `SamplingParams`."""
NEUTRAL_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
FIELD_NAMES = {"max_tokens": "options", "structured": "format"}
KNOWN_OPTIONS = Options.__struct_fields__ + tuple(OPTIONS_WITHOUT_EFFECT) + tuple(UNSUPPORTED_OPTIONS)


def chat_of(body: OllamaChatRequest, serving: Serving) -> Chat:
    """Of a body with messages. Raises `InvalidRequest` naming the field."""
    messages = chat_messages([_message(one, f"messages[{index}]") for index, one in enumerate(body.messages or [])])
    continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return Chat(
        messages=messages,
        tools=[tool_of(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])],
        sampling=sampling_of(body, serving),
        template_kwargs={
            "add_generation_prompt": not continued,
            "continue_final_message": continued,
            **_thinking(body.think),
        },
        field_names={"prompt": "messages", **FIELD_NAMES},
        fit_max_tokens=True,
        timeout=body.timeout_s,
    )


def generate_chat_of(body: OllamaGenerateRequest, serving: Serving) -> Chat:
    """Of a body with a prompt and a chat template around it. Raises `InvalidRequest` naming the field."""
    vocab_size = serving.engine.info.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in body.context or ()):
        raise InvalidRequest(f"context may hold token ids between 0 and {vocab_size - 1}", param="context")
    user = {"role": "user", "content": body.prompt or ""}
    return Chat(
        messages=[{"role": "system", "content": body.system}, user] if body.system else [user],
        sampling=sampling_of(body, serving),
        template_kwargs=_thinking(body.think),
        field_names=FIELD_NAMES,
        prompt_prefix=list(body.context or ()),
        fit_max_tokens=True,
        timeout=body.timeout_s,
    )


async def plain_prompt(body: OllamaGenerateRequest, serving: Serving) -> list[int]:
    """Token ids of a prompt without chat template: raw, or with a suffix. Raises `InvalidRequest`."""
    for name in ("system", "context"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} needs the chat template, which raw and suffix leave out", param=name)
    if body.think:
        raise InvalidRequest("think needs the chat template, which raw and suffix leave out", param="think")
    if body.suffix:
        return await serving.engine.encode_infill(body.prompt or "", body.suffix)
    return await serving.engine.encode(body.prompt or "")


def sampling_of(body: OllamaRequest, serving: Serving) -> dict[str, Any]:
    """Fields of `SamplingParams`. Raises `InvalidRequest` naming the field."""
    options = _options(body, serving.config)
    given = {name: value for name in SAME_NAME if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    if options.seed is not None and options.seed != -1:
        given["seed"] = options.seed
    stop = (options.stop,) if isinstance(options.stop, str) else options.stop or ()
    given |= {"max_tokens": _max_tokens(options.num_predict), "stop": stop}
    _check_context(options, serving)
    _check_repeat_window(options, {**serving.engine.default_sampling, **given})
    try:
        check_stop(stop, serving.config)
        sampling_params(given, {})
    except InvalidRequest as error:
        raise InvalidRequest(f"options: {error.message}", param="options") from error
    return {**given, "structured": _structured(body.format), "logprobs": _num_logprobs(body)}


def ignored_options(body: OllamaRequest) -> list[str]:
    """Those that nobody knows."""
    return [f"options.{name}" for name in body.options or () if name not in KNOWN_OPTIONS]


def _options(body: OllamaRequest, config: ServerConfig) -> Options:
    given = {name: value for name, value in (body.options or {}).items() if value is not None}
    for name in given.keys() & UNSUPPORTED_OPTIONS:
        if given[name] not in UNSUPPORTED_OPTIONS[name]:
            raise InvalidRequest(f"the option {name} is not supported by this server", param="options")
    unknown = [name for name in given if name not in KNOWN_OPTIONS]
    if unknown and config.strict_fields:
        raise InvalidRequest(f"unknown option {unknown[0][:64]}", param="options")
    try:
        return msgspec.convert(given, Options)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"options: {validation_message(error)}", param="options") from error


def _max_tokens(num_predict: int | None) -> int | None:
    if num_predict in (None, -1, -2):
        return None
    if num_predict < 1:
        message = f"num_predict must be at least 1, or -1 or -2 for what the context holds; got {num_predict}"
        raise InvalidRequest(message, param="options")
    return num_predict


def _check_context(options: Options, serving: Serving) -> None:
    limit = serving.model.max_model_len
    if options.num_ctx is not None and options.num_ctx > limit:
        raise InvalidRequest(f"num_ctx may be {limit}, the context's size; got {options.num_ctx}", param="options")


def _check_repeat_window(options: Options, sampling: dict[str, Any]) -> None:
    penalised = any(sampling.get(name, neutral) != neutral for name, neutral in NEUTRAL_PENALTIES.items())
    if penalised and options.repeat_last_n not in (None, -1):
        message = f"repeat_last_n must be -1: penalties look at all tokens; got {options.repeat_last_n}"
        raise InvalidRequest(message, param="options")


def _structured(form: str | dict[str, Any] | None) -> StructuredOutput | None:
    if not form and not isinstance(form, dict):
        return None
    if isinstance(form, dict):
        return json_schema(form)
    if form == "json":
        return StructuredOutput("json_object")
    raise InvalidRequest(f"format must be json or a JSON schema; got {shown(form)}", param="format")


def _num_logprobs(body: OllamaRequest) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_LOGPROBS}; got {top}", param="top_logprobs")
    return top if body.logprobs else None


def _thinking(think: bool | str | None) -> dict[str, Any]:
    if think is None or isinstance(think, bool):
        return {} if think is None else {"enable_thinking": think}
    return {"enable_thinking": True, "reasoning_effort": think}


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """As OpenAI has it."""
    if message.get("images"):
        raise InvalidRequest(f"{where}.images: images are not supported, only text", param="messages")
    converted = {name: value for name, value in message.items() if name not in _RENAMED and name != "images"}
    converted |= {new: message[old] for old, new in _RENAMED.items() if message.get(old)}
    converted["content"] = message.get("content") or ""
    if isinstance(message.get("role"), str):
        converted["role"] = message["role"].lower()
    if isinstance(calls := message.get("tool_calls"), list):
        converted["tool_calls"] = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
    return converted


_RENAMED = {"thinking": "reasoning_content", "tool_name": "name"}
