"""From the fields of /tokenize and of what else renders a chat to its prompt."""

from typing import Any, Protocol

from configs.errors import InvalidRequest
from engine.input_processor import RenderedChat
from server.chat import render
from server.convert.chat import chat_of
from server.protocol.chat import ChatRequest
from server.protocol.common import RequestBody
from server.serving import Serving


class ChatPrompt(Protocol):
    """Fields of a body that decide a chat's prompt."""

    messages: list[dict[str, Any]] | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


CHAT_FIELDS = ("tools", "continue_final_message", "chat_template", "chat_template_kwargs")


def check_chat_fields(body: RequestBody) -> None:
    """Raises `InvalidRequest` for fields that only a chat's prompt depends on."""
    for name in CHAT_FIELDS:
        if getattr(body, name, None):
            raise InvalidRequest(f"{name} needs messages", param=name)


async def rendered_chat(
    serving: Serving,
    body: ChatPrompt,
    *,
    add_generation_prompt: bool | None,
    tools: list[dict[str, Any]] | None = None,
    special: bool = False,
) -> RenderedChat:
    """The prompt as /v1/chat/completions makes it; with the tokenizer's own tokens around it if `special`."""
    chat = ChatRequest(
        messages=body.messages or [],
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    rendered = await render(serving, chat_of(chat, serving.config))
    if not special:
        return rendered
    return rendered._replace(token_ids=await serving.engine.encode(rendered.text, add_special_tokens=True))
