"""Chats that are longer than the context, for protocols that drop what is oldest."""

import dataclasses
import math

from configs.errors import InvalidRequest
from server.chat import Chat, render
from server.serving import Serving

DROPPED = "x-octavo-dropped-messages"
"""The header that says how many messages were left out."""


async def without_oldest(chat: Chat, serving: Serving) -> Chat | None:
    """The chat with its newest messages, as many as leave room for an answer, and all system messages; None where the
    last message is too long.

    Room is a fixed max_tokens, else a quarter of the context or what there is. A chat begins with a user's message if
    it can: many templates ask for that.
    """
    limit = _limit(serving)
    rooms = [room_for_prompt(serving), limit - 1]
    if (max_tokens := chat.sampling.get("max_tokens")) and not chat.fit_max_tokens:
        rooms = [limit - max_tokens]
    last = len(chat.messages) - 1
    roles = [message["role"] for message in chat.messages]
    by_users = [index for index in range(1, last + 1) if roles[index] == "user"]
    others = [index for index in range(1, last + 1) if roles[index] != "tool" or index == last]
    sizes: dict[int, float] = {}

    def begun_at(start: int) -> Chat:
        system = [message for message in chat.messages[:start] if message["role"] in ("system", "developer")]
        return dataclasses.replace(chat, messages=system + chat.messages[start:])

    async def size(start: int) -> float:
        if start not in sizes:
            try:
                sizes[start] = len((await render(serving, begun_at(start), must_fit=True)).token_ids)
            except InvalidRequest:  # the template's, or it is far too long
                sizes[start] = math.inf
        return sizes[start]

    for room in rooms:
        for starts in (by_users, others):
            low, high = 0, len(starts)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if await size(starts[middle]) <= room else (middle + 1, high)
            if low < len(starts):
                return begun_at(starts[low])
    return None


def room_for_prompt(serving: Serving) -> int:
    """Most tokens of a prompt that has to be cut: a quarter of the context is the answer's."""
    return _limit(serving) - _limit(serving) // 4


def _limit(serving: Serving) -> int:
    info = serving.engine.info
    return min(info.max_model_len, info.kv_cache_tokens)
