"""Histories with tool calls in the form that a chat template takes, or as text for templates that know no tools."""

import hashlib
import itertools
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from server.answers.reader import json_text

Message: TypeAlias = dict[str, Any]
"""As in a chat completion's request, with a string for content."""

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_DESCRIPTION = (
    "You can call functions to help with the request. These are they, one JSON object a line:\n<tools>\n"
    "%s\n</tools>\n\n"
    "To call a function, write its name and its arguments as a JSON object between these tags, "
    "one pair of tags for each call:\n"
    '<tool_call>\n{"name": "<name of the function>", "arguments": {<its arguments>}}\n</tool_call>\n'
    "You get each result between <tool_response> tags. Answer directly when no function helps."
)


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Write a message with several calls as several, each followed by its result.

    Results without an id belong to the calls in order; what belongs to none comes last.
    """
    written: list[Message] = []
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            written.append(message)
            continue
        results: dict[str | None, deque[Message]] = {}
        while waiting and waiting[0]["role"] == "tool":
            results.setdefault(waiting[0].get("tool_call_id"), deque()).append(waiting.popleft())
        for call in calls:
            written.append({**message, "tool_calls": [call]})
            message = {"role": message["role"], "content": ""}
            if found := results.get(call.get("id")) or results.get(None):
                written.append(found.popleft())
        written += [result for others in results.values() for result in others]
    return written


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Write ids of nine letters or digits in place of others: ids are opaque, so others mean the same.

    Calls without an id, and results without one, belong together in order.
    """
    written = []
    waiting: deque[str] = deque()
    num_calls = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            calls = [{**call, "id": _short(call.get("id") or f"call {i}")} for i, call in enumerate(calls, num_calls)]
            num_calls += len(calls)
            waiting = deque(call["id"] for call in calls)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            following = waiting.popleft() if waiting else "none"
            message = {**message, "tool_call_id": _short(message.get("tool_call_id") or following)}
        written.append(message)
    return written


def _short(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def plain_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, system_role: bool = True
) -> list[Message]:
    """Write the conversation in system, user and assistant messages of plain content.

    Tools are described in the system message, or without `system_role` in front of the first message, and called in
    the Hermes style. Calls and results in the history become text in the format that the description teaches; results
    that follow each other are one user message. Without tools only the history is rewritten.
    """
    plain: list[Message] = []
    for are_results, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            results = (f"<tool_response>\n{message.get('content') or ''}\n</tool_response>" for message in group)
            plain.append({"role": "user", "content": "\n".join(results)})
        else:
            plain += map(_with_plain_calls, group)
    if not tools:
        return plain
    description = _DESCRIPTION % "\n".join(map(json_text, tools))
    first = plain[0] if plain else {"role": "", "content": ""}
    if first["role"] == "system":
        content = f"{first['content']}\n\n{description}" if first["content"] else description
    elif first["role"] == "user" and not system_role:
        content = f"{description}\n\n{first['content']}"
    else:
        return [{"role": "system", "content": description}, *plain]
    return [{**first, "content": content}, *plain[1:]]


def _with_plain_calls(message: Message) -> Message:
    """The message with its calls, whose arguments are an object or its JSON text, as text."""
    texts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json_text(arguments)
        texts.append(f'<tool_call>\n{{"name": {json_text(name)}, "arguments": {text}}}\n</tool_call>')
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**plain, "content": "\n".join(texts)} if message.get("tool_calls") else plain
