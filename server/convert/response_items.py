"""From items of the Responses API to messages of a chat."""

import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from configs.errors import InvalidRequest, shown
from server.convert.foreign_items import as_function_item, is_of_server
from server.convert.tool_input import arguments_in_history
from server.parsing import validation_message
from server.protocol.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    ItemReference,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
    flat_name,
)

_UNKNOWN_TYPE = re.compile(r"""^Invalid value (['"])(.*)\1 - at `\$(.*)\.type`$""", re.DOTALL)


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def checked(given: dict[str, Any], kind: Any, where: str, param: str) -> Any:
    """`given` as one of the structs of `kind`. Raises `InvalidRequest` that says where in the request it is wrong."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN_TYPE.match(str(error))
        plain = validation_message(error).partition(" - at $")[0]
        place = re.search(r"`\$([^`]*)`$", str(error))
        message = f"type {shown(unknown[2])} is not supported" if unknown else plain
        path = unknown[3] if unknown else place[1] if place else ""
        raise InvalidRequest(f"{where}{path}: {message}", param=param) from error


def read_items(
    given: str | list[dict[str, Any]], stored: Callable[[str], Item | None], passed_over: list[str]
) -> list[Item]:
    """The request's `input`, each item with an id and a status; `stored` finds what references name.

    Items that say nothing to a model here are left out and added to `passed_over`. Raises `InvalidRequest` naming the
    item or its part.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = (_item(item, f"input[{index}]", stored, passed_over) for index, item in enumerate(given))
    return [item for item in items if item is not None]


def _item(
    given: dict[str, Any], where: str, stored: Callable[[str], Item | None], passed_over: list[str]
) -> Item | None:
    kind = given.get("type")
    if kind is None:
        given = {**given, "type": "message" if "role" in given else "item_reference"}
    elif is_of_server(given):
        passed_over.append(f"{where} {kind}")
        return None
    elif kind == "reasoning" and given.get("encrypted_content"):
        passed_over.append(f"{where}.encrypted_content")
    given = as_function_item(given, where, passed_over)
    item: Item | ItemReference = checked(given, Item | ItemReference, where, "input")
    if not isinstance(item, ItemReference):
        return _complete(item)
    if (found := stored(item.id)) is None:
        raise InvalidRequest(f"{where}: no stored response holds an item {shown(item.id)}", param="input")
    return found


def _complete(item: Item) -> Item:
    """With an id, a status, and parts of the kind that fits the role."""
    item = replace(item, id=item.id or new_id(_ID_PREFIXES[type(item)]), status=item.status or "completed")
    if not isinstance(item, MessageItem):
        return item
    from_model = item.role == "assistant"
    given = [InputText(item.content)] if isinstance(item.content, str) else item.content
    parts = [
        part if isinstance(part, Refusal) and from_model else (OutputText if from_model else InputText)(_text(part))
        for part in given
    ]
    return replace(item, content=parts)


_ID_PREFIXES: dict[type[Item], str] = {
    MessageItem: "msg",
    ReasoningItem: "rs",
    FunctionCallItem: "fc",
    FunctionCallOutputItem: "fco",
}


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """As chat templates take them: what the model said between two inputs is one message with its reasoning and calls.

    Raises `InvalidRequest` for outputs of calls that were never made.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        if isinstance(item, FunctionCallItem):
            names[item.call_id] = flat_name(item.namespace, item.name)
            _said(messages, "tool_calls").setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, FunctionCallOutputItem):
            messages.append(_call_output(item, names))
        elif isinstance(item, ReasoningItem):
            if text := _joined(item.content or item.summary):
                _said(messages, "reasoning_content")["reasoning_content"] = text
        elif item.role == "assistant":
            _said(messages, "content")["content"] = _joined(item.content)
        else:
            messages.append({"role": item.role, "content": _joined(item.content)})
    return [
        {"content": "", **message} for message in messages if message.keys() & {"content", "tool_calls"}
    ]  # reasoning that led to nothing is no message


_ORDER = {"reasoning_content": 0, "content": 1, "tool_calls": 2}


def _said(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """The assistant's message that `part` belongs to: the last one, unless it is past that part."""
    if messages and messages[-1]["role"] == "assistant":
        last = max(_ORDER.get(name, -1) for name in messages[-1])
        if last < _ORDER[part] or last == _ORDER[part] == _ORDER["tool_calls"]:
            return messages[-1]
    messages.append({"role": "assistant"})
    return messages[-1]


def _call(item: FunctionCallItem) -> dict[str, Any]:
    arguments = arguments_in_history(item.arguments, "arguments", "input")
    function = {"name": flat_name(item.namespace, item.name), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _call_output(item: FunctionCallOutputItem, names: dict[str, str]) -> dict[str, Any]:
    if (name := names.get(item.call_id)) is None:
        raise InvalidRequest(f"no function call before the output of {shown(item.call_id)}", param="input")
    return {"role": "tool", "tool_call_id": item.call_id, "name": name, "content": _joined(item.output)}


def _joined(parts: Any) -> str:
    return parts if isinstance(parts, str) else "\n".join(map(_text, parts))


def _text(part: Any) -> str:
    text: str = part.refusal if isinstance(part, Refusal) else part.text
    return text
