"""Calls of a history in the form that a template insists on. Ids are opaque, so others mean the same."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Message = dict[str, Any]


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """A message with several calls as several, each followed by its result."""
    result: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) > 1:
            result += [
                {**(message if index == 0 else _empty(message)), "tool_calls": [call]}
                for index, call in enumerate(calls)
            ]
        elif message["role"] == "tool" and (place := _behind_call(result, message.get("tool_call_id"))):
            result.insert(place, message)
        else:
            result.append(message)
    return result


def _empty(message: Message) -> Message:
    return {"role": message["role"], "content": ""}


def _behind_call(messages: list[Message], call_id: str | None) -> int:
    """Where the result belongs: behind the call of this id, else behind the first that has no result; 0: at the end."""
    start = len(messages)
    while start and (messages[start - 1]["role"] == "tool" or messages[start - 1].get("tool_calls")):
        start -= 1
    waiting = [
        place
        for place in range(start, len(messages))
        if messages[place].get("tool_calls") and (place + 1 == len(messages) or messages[place + 1]["role"] != "tool")
    ]
    named = [place for place in waiting if call_id and messages[place]["tool_calls"][0].get("id") == call_id]
    return (named or waiting or [-1])[0] + 1


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of nine letters or digits in place of others. Calls without one, and results, belong together in order."""
    waiting: list[str] = []
    result = []
    num_calls = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [_short(call.get("id") or f"call {num_calls + index}") for index, call in enumerate(calls)]
            num_calls += len(calls)
            waiting = list(ids)
            message = {**message, "tool_calls": [{**call, "id": one} for call, one in zip(calls, ids, strict=True)]}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            one = _short(given) if given else waiting[0] if waiting else _short("none")
            waiting = [other for other in waiting if other != one]
            message = {**message, "tool_call_id": one}
        result.append(message)
    return result


def _short(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
