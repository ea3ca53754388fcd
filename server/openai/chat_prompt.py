"""The prompt of a chat, for routes that take one and do not answer it: /tokenize, /apply-template, embeddings."""

from typing import Annotated, Any

from configs.errors import InvalidRequest
from engine.input_processor import RenderedChat
from server.bodies import ModelRequest, Unsupported
from server.chat import render
from server.openai.chat import ChatRequest, chat_of
from server.openai.messages import Messages, Tool
from server.serving import Serving

_CHAT_FIELDS = ("tools", "continue_final_message", "chat_template", "chat_template_kwargs")


class ChatPromptFields(ModelRequest):
    """What decides a chat's prompt."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    """End the prompt with the header of an assistant message (default: unless continue_final_message)."""
    continue_final_message: bool | None = None
    """Leave the last message open."""
    chat_template: str | None = None
    """Jinja source to be used instead of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    tools: list[Tool] | None = None
    mm_processor_kwargs: Annotated[Any, Unsupported(({},))] = None
    media_io_kwargs: Annotated[Any, Unsupported(({},))] = None

    def check_without_messages(self) -> None:
        """Raise `InvalidRequest` for fields that only a chat's prompt depends on."""
        for name in _CHAT_FIELDS:
            if getattr(self, name):
                raise InvalidRequest(f"{name} needs messages", param=name)

    async def render(self, serving: Serving, *, opened: bool | None, special: bool = False) -> RenderedChat:
        """The prompt as /v1/chat/completions makes it; with the tokenizer's own tokens around it if `special`.

        `opened` is the value of add_generation_prompt. Raises `InvalidRequest`.
        """
        chat = ChatRequest.model_construct(
            messages=self.messages or [],
            tools=self.tools,
            add_generation_prompt=opened,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        rendered = await render(serving, chat_of(chat, serving.config))
        if not special:
            return rendered
        return rendered._replace(token_ids=await serving.engine.encode(rendered.text, add_special_tokens=True))
