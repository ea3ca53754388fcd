"""What is longer than the context, for protocols that cut it: texts, and chats that lose what is oldest."""

import dataclasses
import math
from collections.abc import Awaitable, Callable

from configs.errors import ContextLengthExceeded, InvalidRequest
from server.chat import Answers, Chat, render, start_chat
from server.generation import Generation
from server.serving import Serving

_DROPPED = "x-octavo-dropped-messages"
"""The header that says how many messages were left out."""
_CUT_TO = "x-octavo-prompt-cut-to"
"""The header that says how many tokens were left of a prompt."""
_CHARACTERS = 8
"""More than the mean token has, in most texts."""
_MARGIN = 64
"""Tokens at a cut, which may be others than in the whole text."""
Shorten = Callable[[Chat, Serving], Awaitable[Chat | None]]


async def start_shortened(
    serving: Serving, chat: Chat, id_prefix: str, shorten: Shorten | None
) -> tuple[Generation, Answers, dict[str, str]]:
    """What `start_chat` starts: where the chat is longer than the context, what `shorten` leaves; headers say so."""
    try:
        return *await start_chat(serving, chat, id_prefix), {}
    except ContextLengthExceeded:
        shorter = shorten and await shorten(chat, serving)
        if shorter is None:
            raise
    generation, answers = await start_chat(serving, shorter, id_prefix)
    num_dropped = len(chat.messages) - len(shorter.messages)
    cut = {_DROPPED: str(num_dropped)} if num_dropped else {_CUT_TO: str(generation.num_prompt_tokens)}
    return generation, answers, cut


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


async def without_beginning(chat: Chat, serving: Serving) -> Chat:
    """The chat with as much of the end of its prefix and its last message as leaves room for an answer; as it is where
    the template alone is too long."""
    *others, last = chat.messages
    without_prompt = dataclasses.replace(chat, messages=[*others, {**last, "content": ""}])
    around = await render(serving, without_prompt, must_fit=True)
    room = room_for_prompt(serving) - len(around.token_ids)
    if room < 1:
        return chat
    token_ids = await encode_part(serving, last["content"], room, add_special_tokens=False)
    if len(token_ids) > room:
        token_ids = token_ids[-room:]
        last = {**last, "content": await serving.engine.decode(token_ids, skip_special_tokens=False)}
    num_context = min(room - len(token_ids), len(chat.prompt_prefix))
    prefix = chat.prompt_prefix[len(chat.prompt_prefix) - num_context :]
    return dataclasses.replace(chat, messages=[*others, last], prompt_prefix=prefix)


async def encode_shortened(serving: Serving, text: str) -> tuple[list[int], dict[str, str]]:
    """Token ids of a text. Of one that the context does not hold, those of its end, which leaves room for an answer,
    behind the token that begins all texts; headers say so."""
    token_ids = await encode_part(serving, text, context_size(serving))
    if len(token_ids) < context_size(serving):
        return token_ids, {}
    begins, room = token_ids[:1] == [serving.engine.tokenizer.bos_token_id], room_for_prompt(serving)
    return token_ids[:begins] + token_ids[begins - room :], {_CUT_TO: str(room)}


async def encode_part(
    serving: Serving, text: str, num_tokens: int, side: str = "left", *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text, of which the caller keeps `num_tokens` and cuts off the others at this side. A long text is
    not encoded as a whole: the answer has all that are kept, and mostly few others."""
    size = max(num_tokens, _MARGIN) * _CHARACTERS
    while size < len(text):
        part = text[:size] if side == "right" else text[-size:]
        token_ids = await serving.engine.encode(part, add_special_tokens=add_special_tokens)
        if len(token_ids) >= num_tokens + _MARGIN:
            return token_ids
        size *= 4
    return await serving.engine.encode(text, add_special_tokens=add_special_tokens)


def room_for_prompt(serving: Serving) -> int:
    """Most tokens of a prompt that has to be cut: a quarter of the context is the answer's."""
    return context_size(serving) - context_size(serving) // 4


def context_size(serving: Serving) -> int:
    """Most tokens that a prompt can have."""
    info = serving.engine.info
    return min(info.max_model_len, info.kv_cache_tokens)
