"""Calls of a history in the form that a template insists on. Ids are opaque, so others mean the same."""

import hashlib
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Message = dict[str, Any]


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """A message with several calls as several, each followed by its result."""
    told: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if len(message.get("tool_calls") or ()) < 2:
            told.append(message)
            continue
        begin = place
        while place < len(messages) and messages[place]["role"] == "tool":
            place += 1
        told += _one_by_one(message, messages[begin:place])
    return told


def _one_by_one(message: Message, results: Sequence[Message]) -> list[Message]:
    """Results without an id belong to the calls in order; what belongs to none comes last."""
    waiting: dict[str | None, deque[Message]] = {}
    for result in results:
        waiting.setdefault(result.get("tool_call_id"), deque()).append(result)
    told = []
    for index, call in enumerate(message["tool_calls"]):
        before = {"role": message["role"], "content": ""} if index else message
        told.append({**before, "tool_calls": [call]})
        if found := waiting.get(call.get("id")) or waiting.get(None):
            told.append(found.popleft())
    return told + [result for others in waiting.values() for result in others]


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of nine letters or digits in place of others. Calls without one, and results, belong together in order."""
    told = []
    waiting: deque[str] = deque()
    num_calls = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [_short(call.get("id") or f"call {num_calls + index}") for index, call in enumerate(calls)]
            num_calls += len(calls)
            waiting = deque(ids)
            message = {**message, "tool_calls": [{**call, "id": one} for call, one in zip(calls, ids, strict=True)]}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            following = waiting.popleft() if waiting else _short("none")
            message = {**message, "tool_call_id": _short(given) if given else following}
        told.append(message)
    return told


def _short(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
