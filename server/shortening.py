"""What is longer than the context, for protocols that cut it: texts, and chats that lose what is oldest."""

import dataclasses
import math

from configs.errors import ContextLengthExceeded, InvalidRequest
from server.chat import Answers, Chat, render, start_chat
from server.generation import Generation
from server.serving import Serving

DROPPED = "x-octavo-dropped-messages"
"""The header that says how many messages were left out."""


async def start_shortened(
    serving: Serving, chat: Chat, id_prefix: str, *, may_drop: bool
) -> tuple[Generation, Answers, dict[str, str]]:
    """As `start_chat`, without its oldest messages where the chat is too long and `may_drop`; headers say so."""
    try:
        return *await start_chat(serving, chat, id_prefix), {}
    except ContextLengthExceeded:
        shorter = await without_oldest(chat, serving) if may_drop else None
        if shorter is None:
            raise
    num_dropped = len(chat.messages) - len(shorter.messages)
    return *await start_chat(serving, shorter, id_prefix), {DROPPED: str(num_dropped)}


async def without_oldest(chat: Chat, serving: Serving) -> Chat | None:
    """The chat with its newest messages, as many as leave room for an answer, and all system messages; None where the
    last message is too long.

    Room is a fixed max_tokens, else a quarter of the context or what there is. A chat begins with a user's message if
    it can: many templates ask for that.
    """
    limit = context_size(serving)
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


async def encode_part(
    serving: Serving, text: str, num_tokens: int, side: str = "left", *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text of which the caller keeps so many, and cuts off the others at this side: of a long text, all
    that are kept and mostly few others."""
    size = max(num_tokens, _MARGIN) * _CHARACTERS
    while size < len(text):
        part = text[:size] if side == "right" else text[-size:]
        token_ids = await serving.engine.encode(part, add_special_tokens=add_special_tokens)
        if len(token_ids) >= num_tokens + _MARGIN:
            return token_ids
        size *= 4
    return await serving.engine.encode(text, add_special_tokens=add_special_tokens)


_CHARACTERS = 8
"""More than the mean token has, in most texts."""
_MARGIN = 64
"""Tokens at a cut, which may be others than in the whole text."""


def room_for_prompt(serving: Serving) -> int:
    """Most tokens of a prompt that has to be cut: a quarter of the context is the answer's."""
    return context_size(serving) - context_size(serving) // 4


def context_size(serving: Serving) -> int:
    """Most tokens that a prompt can have."""
    info = serving.engine.info
    return min(info.max_model_len, info.kv_cache_tokens)
