"""From the fields of /v1/responses to a `Chat`, and to the response's first snapshot."""

from collections.abc import Sequence
from typing import Any

from configs.errors import InvalidRequest, shown
from configs.sampling import MAX_LOGPROBS, SamplingParams, StructuredOutput
from configs.settings import ServerConfig
from server.chat import Chat
from server.convert.response_items import chat_messages
from server.convert.sampling import given_fields
from server.convert.structured import is_same, response_format, structured_outputs
from server.convert.tools import flattened, tool_choice, tools_of_response
from server.generation import Generation
from server.protocol.response_items import Item
from server.protocol.responses import INCLUDABLE, ReasoningEcho, Response, ResponsesRequest, TextEcho, TextOptions

LOGPROBS = "message.output_text.logprobs"
_ONE_ANSWER = {
    "n": 1,
    "max_tokens": None,
    "prompt_logprobs": None,
    "use_beam_search": False,
    "length_penalty": None,
}
"""Fields of other routes that have no place here, with the value that passes."""
_FIELDS = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
"""By the names that errors of a chat and of the engine give them."""


def chat_of(body: ResponsesRequest, items: Sequence[Item], config: ServerConfig) -> Chat:
    """`items`: what the model is to answer, from earlier responses too. Raises `InvalidRequest` naming the field."""
    _check(body)
    passed_over: list[str] = []
    choice, tools = tool_choice(body.tool_choice, flattened(tools_of_response(body.tools, passed_over)))
    if body.text and body.text.verbosity in ("low", "high"):
        passed_over.append("text.verbosity")
    field, structured = _structured(body)
    messages = chat_messages(items)
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    if not messages:
        raise InvalidRequest("input is empty", param="input")
    return Chat(
        messages=messages,
        sampling={
            **given_fields(body, config),
            "max_tokens": body.max_output_tokens,
            "logprobs": _num_logprobs(body),
            "structured": structured,
        },
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_kwargs=_template_kwargs(body),
        field_names={**_FIELDS, **({"structured": field} if field else {})},
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=body.timeout_s,
        passed_over=passed_over,
    )


def first_snapshot(body: ResponsesRequest, generation: Generation) -> Response:
    params: SamplingParams = generation.prompts[0].params
    return Response(
        id=generation.id,
        created_at=generation.created,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=generation.serving.model.id,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(body.reasoning.effort if body.reasoning else None),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=params.temperature,
        text=_echoed_text(body.text),
        tool_choice=_echoed_choice(body.tool_choice),
        tools=tools_of_response(body.tools, []),
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


def _check(body: ResponsesRequest) -> None:
    for name, neutral in _ONE_ANSWER.items():
        if getattr(body, name) not in (None, neutral):
            raise InvalidRequest(f"{name} is not supported by this route", param=name)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        message = f"max_output_tokens must be at least 1; got {body.max_output_tokens}"
        raise InvalidRequest(message, param="max_output_tokens")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store, to find the answer later", param="background")
    if body.stream_options and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.stream_options and body.stream_options.include_obfuscation:
        raise InvalidRequest("include_obfuscation is not supported by this server", param="stream_options")
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise InvalidRequest(f"include knows no {shown(name)}", param="include")


def _num_logprobs(body: ResponsesRequest) -> int | None:
    top = body.top_logprobs or 0
    wanted = LOGPROBS in (body.include or ())
    if top and not wanted:
        raise InvalidRequest(f"top_logprobs needs include to hold {LOGPROBS}", param="top_logprobs")
    if not 0 <= top <= MAX_LOGPROBS:
        message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}; got {top}"
        raise InvalidRequest(message, param="top_logprobs")
    return top if wanted else None


def _echoed_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """In this route's form, also where the request has that of /v1/chat/completions."""
    if isinstance(given, dict) and isinstance(function := given.get("function"), dict):
        return {"type": "function", "name": function["name"]}
    return given or "auto"


def _echoed_text(given: TextOptions | None) -> TextEcho:
    return TextEcho((given and given.format) or {"type": "text"}, (given and given.verbosity) or "medium")


def _structured(body: ResponsesRequest) -> tuple[str | None, StructuredOutput | None]:
    """The language of the answer, and the field that gives it."""
    of_text = _text_format(body.text.format if body.text else None)
    other = structured_outputs(body.structured_outputs) if body.structured_outputs else None
    if of_text and other and not is_same(of_text, other):
        raise InvalidRequest("text.format and structured_outputs exclude each other", param="structured_outputs")
    return ("text.format", of_text) if of_text else ("structured_outputs" if other else None, other)


def _text_format(form: dict[str, Any] | None) -> StructuredOutput | None:
    if form is None:
        return None
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        message = f"text.format.type must be text, json_object or json_schema; got {shown(kind)}"
        raise InvalidRequest(message, param="text.format")
    if kind == "json_schema" and not (isinstance(form.get("name"), str) and isinstance(form.get("schema"), dict)):
        raise InvalidRequest("text.format needs a name and a JSON schema", param="text.format")
    return response_format(form)


def _template_kwargs(body: ResponsesRequest) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    thinking = {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
    return {**thinking, "add_generation_prompt": True}
