"""From the fields of Ollama's /api/chat and /api/generate to what the engine takes."""

import dataclasses
from typing import Any

import msgspec

from configs.errors import InvalidRequest, shown
from configs.sampling import MAX_LOGPROBS, SamplingParams, StructuredOutput
from configs.settings import ServerConfig
from server.chat import Chat, render
from server.convert.chat import chat_messages
from server.convert.shortening import room_for_prompt
from server.convert.tools import offered, tool_of
from server.parsing import validation_message
from server.protocol.ollama import (
    OPTIONS_WITHOUT_EFFECT,
    PASSED_OVER,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    Options,
)
from server.sampling import NEUTRAL_PENALTIES, check_stop, is_penalised, sampling_params
from server.serving import Serving
from server.structured import json_schema

SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
"""Options that mean the same in `SamplingParams`."""
FIELD_NAMES = {"max_tokens": "options", "structured": "format"}
KNOWN_OPTIONS = Options.__struct_fields__ + tuple(OPTIONS_WITHOUT_EFFECT)


def chat_of(body: OllamaChatRequest, serving: Serving) -> Chat:
    """Of a body with messages. Raises `InvalidRequest` naming the field."""
    passed_over: list[str] = []
    given = [_message(one, f"messages[{index}]") for index, one in enumerate(body.messages or [])]
    messages = chat_messages(given, passed_over)
    continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return Chat(
        messages=messages,
        tools=offered(body.tools, tool_of, passed_over),
        passed_over=passed_over,
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


async def plain_prompt(body: OllamaGenerateRequest, serving: Serving, *, must_fit: bool) -> list[int]:
    """Token ids of a prompt without chat template: raw, or with a suffix. Raises `InvalidRequest`.

    With `must_fit`, a text that is too long is mostly refused before it is encoded.
    """
    for name in ("system", "context"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} needs the chat template, which raw and suffix leave out", param=name)
    if body.think:
        raise InvalidRequest("think needs the chat template, which raw and suffix leave out", param="think")
    if body.suffix:
        return await serving.engine.encode_infill(body.prompt or "", body.suffix, must_fit=must_fit)
    return await serving.engine.encode(body.prompt or "", must_fit=must_fit)


async def without_beginning(body: OllamaGenerateRequest, chat: Chat, serving: Serving) -> Chat | None:
    """The chat with as much of the end of `context` and prompt as leaves room for an answer; None where the template
    alone is too long."""
    empty = {**chat.messages[-1], "content": ""}
    without_prompt = dataclasses.replace(chat, messages=[*chat.messages[:-1], empty])
    around = await render(serving, without_prompt, must_fit=True)
    room = room_for_prompt(serving) - len(around.token_ids)
    if room < 1:
        return None
    token_ids = await serving.engine.encode(body.prompt or "", add_special_tokens=False)
    prompt = chat.messages[-1]["content"]
    if len(token_ids) > room:
        prompt = await serving.engine.decode(token_ids[-room:], skip_special_tokens=False)
    num_context = max(0, min(room - len(token_ids), len(chat.prompt_prefix)))
    return dataclasses.replace(
        chat,
        messages=[*chat.messages[:-1], {**empty, "content": prompt}],
        prompt_prefix=chat.prompt_prefix[len(chat.prompt_prefix) - num_context :],
    )


def end_of(token_ids: list[int], serving: Serving) -> list[int]:
    """The end of a prompt that leaves room for an answer, behind the token that begins all texts."""
    begins = token_ids[:1] == [serving.engine.tokenizer.bos_token_id]
    return token_ids[:begins] + token_ids[begins - room_for_prompt(serving) :]


def sampling_of(body: OllamaRequest, serving: Serving) -> dict[str, Any]:
    """Fields of `SamplingParams`. Raises `InvalidRequest` naming the field."""
    options = _options(body.options, serving.config)
    given = {name: value for name in SAME_NAME if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    if options.seed is not None and options.seed != -1:
        given["seed"] = options.seed
    if options.repeat_last_n == 0:
        given |= NEUTRAL_PENALTIES
    stop = (options.stop,) if isinstance(options.stop, str) else options.stop or ()
    given |= {"max_tokens": _max_tokens(options.num_predict), "stop": stop}
    try:
        check_stop(stop, serving.config)
        sampling_params(given, {})
    except InvalidRequest as error:
        raise InvalidRequest(f"options: {error.message}", param="options") from error
    return {**given, "structured": _structured(body.format), "logprobs": _num_logprobs(body)}


def ignored_fields(body: OllamaRequest, params: SamplingParams, max_model_len: int) -> list[str]:
    """Names of the fields that are not served as they stand; `params` are those that the request came to."""
    options = body.options or {}
    ignored = _ignored_options(options)
    if (options.get("num_ctx") or 0) > max_model_len:
        ignored.append("num_ctx")
    if is_penalised(params) and options.get("repeat_last_n") not in (None, -1):
        ignored.append("repeat_last_n")
    return [f"options.{name}" for name in ignored] + (["shift"] if body.shift else [])


def _ignored_options(given: dict[str, Any] | None) -> list[str]:
    """Whatever they are worth: those that nobody knows, or that would change an answer elsewhere."""
    asked = {name: value for name, value in (given or {}).items() if value is not None}
    return [name for name in asked if name not in KNOWN_OPTIONS and asked[name] not in PASSED_OVER.get(name, ())]


def _options(options: dict[str, Any] | None, config: ServerConfig) -> Options:
    ignored = _ignored_options(options)
    if ignored and config.strict_fields:
        raise InvalidRequest(f"the option {ignored[0][:64]} is not supported by this server", param="options")
    # clients write all numbers as floats; as at Ollama, those without a fraction are integers as well
    given = {name: _as_integer(value) for name, value in (options or {}).items() if value is not None}
    try:
        return msgspec.convert(given, Options)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"options: {validation_message(error)}", param="options") from error


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _max_tokens(num_predict: int | None) -> int | None:
    if num_predict in (None, -1, -2):
        return None
    if num_predict < 1:
        message = f"num_predict must be at least 1, or -1 or -2 for what the context holds; got {num_predict}"
        raise InvalidRequest(message, param="options")
    return num_predict


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
    images = message.get("images")
    if images and message.get("role") != "tool":
        raise InvalidRequest(f"{where}.images: images are not supported, only text", param="messages")
    converted = {name: value for name, value in message.items() if name not in _RENAMED and name != "images"}
    converted |= {new: message[old] for old, new in _RENAMED.items() if message.get(old)}
    converted["content"] = message.get("content") or ""
    if images:
        converted["content"] = [{"type": "text", "text": converted["content"]}, {"type": "image"}]
    if isinstance(message.get("role"), str):
        converted["role"] = message["role"].lower()
    if isinstance(calls := message.get("tool_calls"), list):
        converted["tool_calls"] = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
    return converted


_RENAMED = {"thinking": "reasoning_content", "tool_name": "name"}
