"""From a request's items and fields to a `Chat`, and to the response that begins."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import msgspec
from pydantic_core import to_json

from configs.errors import InvalidRequest, shown
from configs.sampling import StructuredOutput
from configs.settings import ServerConfig
from server.chat import Chat
from server.generation import Generation
from server.openai.messages import part_text
from server.openai.responses.models import Item, ResponseObject, ResponsesRequest, Status, item_kind, new_id
from server.sampling import given_fields
from server.structured import response_format, structured_outputs
from server.tools import arguments_in_history, checked_json, flat_name, offered, result_text, tool_choice

_LOGPROBS = "message.output_text.logprobs"
_FIELD_NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
"""Fields of the request, by the names that errors of a chat and of the engine give them."""
_ABOUT_ITEMS = {"type", "id", "call_id", "status", "namespace", "caller", "created_by", "agent"}
"""Keys of a call that are no arguments."""


def read_items(body: ResponsesRequest, stored: Callable[[str], Item | None], passed_over: list[str]) -> list[Item]:
    """The request's `input`, each item with an id and a status; `stored` finds what references name.

    Items that say nothing to a model here are left out and added to `passed_over`. Raises `InvalidRequest` naming the
    item or its part.
    """
    given: Any = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    items: list[Any] = []
    for index, item in enumerate(given):
        kind, where = item_kind(item), f"input[{index}]"
        if kind == "server":
            passed_over.append(f"{where} {item['type']}")
        elif kind == "item_reference":
            if (found := stored(item["id"])) is None:
                raise InvalidRequest(f"{where}: no stored response holds an item {shown(item['id'])}", param="input")
            items.append(found)
        else:
            kind, fields = _READERS[kind](item, where, passed_over)
            status = item.get("status") if item.get("status") in get_args(Status) else "completed"
            items.append({"type": kind, "id": item.get("id") or new_id(kind), "status": status, **fields})
    return items


def _message(item: Any, where: str, passed_over: list[str]) -> tuple[str, dict[str, Any]]:
    role, given = item["role"], item["content"]
    parts = [{"type": "input_text", "text": given}] if isinstance(given, str) else given
    return "message", {"role": role, "content": [_part(part, role) for part in parts]}


def _part(part: Any, role: str) -> dict[str, Any]:
    """A part of a message in the form that answers have for messages of the role."""
    if role != "assistant":
        return {"type": "input_text", "text": part_text(part)}
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part["refusal"]}
    return {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}


def _reasoning(item: Any, where: str, passed_over: list[str]) -> tuple[str, dict[str, Any]]:
    content, summary = (
        [{"type": kind, "text": part["text"]} for part in item.get(name) or ()]
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
    )
    passed_over += [f"{where}.encrypted_content"] if item.get("encrypted_content") else []
    encrypted = {"encrypted_content": item["encrypted_content"]} if "encrypted_content" in item else {}
    return "reasoning", {"summary": summary, "content": content or None, **encrypted}


def _call(item: Any, where: str, passed_over: list[str]) -> tuple[str, dict[str, Any]]:
    """A call of whatever kind becomes one of a function: local_shell_call one of `local_shell`."""
    kind, call = item["type"], {"call_id": item["call_id"]}
    if kind in ("function_call", "custom_tool_call"):
        call["name"] = item["name"]
        call |= {"namespace": item["namespace"]} if item.get("namespace") else {}
        arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
    else:
        call["name"] = kind.removesuffix("_call")
        arguments = {key: value for key, value in item.items() if key not in _ABOUT_ITEMS}
    text = arguments if isinstance(arguments, str) else checked_json(arguments, where, "input")
    return "function_call", {**call, "arguments": text}


def _output(item: Any, where: str, passed_over: list[str]) -> tuple[str, dict[str, Any]]:
    """What a call of whatever kind gave becomes the result of a function. Raises `InvalidRequest` naming the part."""
    call_id, output = item.get("call_id") or item.get("id"), item["output"]
    if call_id is None:
        raise InvalidRequest(f"{where}.call_id: field required", param="input")
    parts = [output] if isinstance(output, dict) else output
    is_typed = isinstance(parts, list) and all(isinstance(part, dict) and "type" in part for part in parts)
    if is_typed or item["type"] in ("function_call_output", "custom_tool_call_output"):
        output = result_text(parts, f"{where}.output", "input", passed_over)
    elif not isinstance(output, str):  # of a shell, say
        output = checked_json(output, f"{where}.output", "input")
    return "function_call_output", {"call_id": call_id, "output": output}


_READERS = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "client_call": _call,
    "output": _output,
}
"""What makes of an item, by its `item_kind`, one that is kept: its type and the fields of its own."""


def template_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Messages for chat templates: what the model said between two inputs is one, with its reasoning and calls.

    Raises `InvalidRequest` for outputs of calls that were never made.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    item: Any
    for item in items:
        if item["type"] == "function_call":
            name = names[item["call_id"]] = flat_name(item.get("namespace"), item["name"])
            arguments = arguments_in_history(item["arguments"], "arguments", "input")
            call = {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}
            _assistant_message(messages, "tool_calls").setdefault("tool_calls", []).append(call)
        elif item["type"] == "function_call_output":
            call_id, content = item["call_id"], item["output"]
            if call_id not in names:
                raise InvalidRequest(f"no function call before the output of {shown(call_id)}", param="input")
            messages.append({"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": content})
        elif item["type"] == "reasoning":
            if text := _joined(item.get("content") or item["summary"]):
                _assistant_message(messages, "reasoning_content")["reasoning_content"] = text
        elif item["role"] == "assistant":
            _assistant_message(messages, "content")["content"] = _joined(item["content"])
        else:
            messages.append({"role": item["role"], "content": _joined(item["content"])})
    # reasoning that led to nothing is no message
    return [{"content": "", **message} for message in messages if message.keys() & {"content", "tool_calls"}]


_NOT_BEHIND = {
    "reasoning_content": {"reasoning_content", "content", "tool_calls"},
    "content": {"content", "tool_calls"},
    "tool_calls": set(),
}
"""What ends an assistant's message when a part of it comes."""


def _assistant_message(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """The message that the field `part` belongs to: the last one or a new one."""
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].keys() & _NOT_BEHIND[part]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _joined(parts: Iterable[Any]) -> str:
    return "\n".join(map(part_text, parts))


def chat_of(body: ResponsesRequest, items: Sequence[Item], config: ServerConfig, passed_over: list[str]) -> Chat:
    """The chat that ends with `items`, which include those of earlier responses. Raises `InvalidRequest` naming the
    field."""
    _check(body)
    choice, tools = tool_choice(body.tool_choice, _template_tools(offered_tools(body, passed_over)))
    if body.text and body.text.get("verbosity") in ("low", "high"):
        passed_over.append("text.verbosity")
    field, structured = _structured(body)
    messages = template_messages(items)
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    if not messages:
        raise InvalidRequest("input is empty", param="input")
    effort = (body.reasoning or {}).get("effort")
    thinking = {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
    return Chat(
        messages=messages,
        sampling={
            **given_fields(body, config),
            "max_tokens": body.max_output_tokens,
            "logprobs": (body.top_logprobs or 0) if _LOGPROBS in (body.include or ()) else None,
            "structured": structured,
        },
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_kwargs={**thinking, "add_generation_prompt": True},
        field_names={**_FIELD_NAMES, "structured": field},
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=body.timeout_s,
        passed_over=passed_over,
    )


def _check(body: ResponsesRequest) -> None:
    """Raises `InvalidRequest` for fields that need others."""
    if body.background and body.store is False:
        raise InvalidRequest("background needs store, to find the answer later", param="background")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.top_logprobs and _LOGPROBS not in (body.include or ()):
        raise InvalidRequest(f"top_logprobs needs include to hold {_LOGPROBS}", param="top_logprobs")


def _structured(body: ResponsesRequest) -> tuple[str, StructuredOutput | None]:
    """The field that gives the language of the answer, and that language. Raises `InvalidRequest` where two do."""
    form: Any = (body.text or {}).get("format")
    of_text = response_format(form) if form else None
    other = structured_outputs(body.structured_outputs) if body.structured_outputs else None
    if of_text and other and of_text != other:
        raise InvalidRequest("text.format and structured_outputs exclude each other", param="structured_outputs")
    return ("text.format", of_text) if of_text else ("structured_outputs", other)


def offered_tools(body: ResponsesRequest, passed_over: list[str]) -> list[dict[str, Any]]:
    """The functions and namespaces among the tools, with the keys that are known."""

    def known(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
        keys = ("name", "description", "parameters", "strict")
        described: dict[str, Any] = {"type": tool.get("type") or "function"}
        described |= {key: tool[key] for key in keys if tool.get(key) is not None}
        if described["type"] == "namespace":
            described["tools"] = offered(tool["tools"], passed_over, known, where=f"{where}.tools")
        return described

    return offered(body.tools, passed_over, known, types=("function", "namespace"))


def _functions(tools: list[dict[str, Any]]) -> list[tuple[str | None, dict[str, Any]]]:
    """All functions, those that stand alone and those in namespaces, each with its namespace."""
    spaces = [(tool["name"], tool["tools"]) if tool["type"] == "namespace" else (None, [tool]) for tool in tools]
    return [(space, function) for space, functions in spaces for function in functions]


def _template_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as templates print them: functions alone, with the namespace in their name."""
    named = ({**function, "name": flat_name(space, function["name"])} for space, function in _functions(tools))
    return [{"type": one.pop("type"), "function": one} for one in named]


def namespaces_of(tools: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Namespace and name of functions, by the names that the model has for them."""
    return {flat_name(space, one["name"]): (space, one["name"]) for space, one in _functions(tools) if space}


def first_response(body: ResponsesRequest, generation: Generation, tools: list[dict[str, Any]]) -> Any:
    """The `ResponseObject` before anything has been generated, with the fields that it shares with the request."""
    response: dict[str, Any] = dict.fromkeys(ResponseObject.__annotations__)
    response |= {"background": False, "parallel_tool_calls": True, "store": True, "top_logprobs": 0, "metadata": {}}
    shared = {name: getattr(body, name) for name in ResponsesRequest.model_fields if name in response}
    response |= {name: value for name, value in shared.items() if value is not None}
    params = generation.prompts[0].params
    choice: Any = body.tool_choice or "auto"
    if isinstance(choice, dict) and choice.get("function"):  # as /v1/chat/completions has it
        choice = {"type": "function", "name": choice["function"]["name"]}
    text = body.text or {}
    form = {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"}
    return response | {
        "id": generation.id,
        "object": "response",
        "created_at": generation.created,
        "status": "queued" if body.background else "in_progress",
        "model": generation.serving.model.id,
        "output": [],
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "temperature": params.temperature,
        "text": _raw(form),
        "tool_choice": _raw(choice),
        "tools": _raw(tools),
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
    }


def _raw(value: Any) -> Any:
    """The value as JSON that is encoded once: what clients send may hold integers that msgspec cannot encode."""
    return msgspec.Raw(to_json(value, inf_nan_mode="null"))
