"""Chat templates: Jinja from the checkpoint, run in its sandbox as transformers' `apply_chat_template` does.

Spellings of control tokens inside a message are not escaped: the rendered text is encoded as a whole, so they
become control tokens, as they do in transformers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError

from configs.errors import CheckpointError, InvalidRequest, shown

from .template_sandbox import Refusal, Sandbox

NO_TEMPLATE = "the model has no chat template"
_PROBE = "octavo probes content parts"
_END_MARK = "octavo-ends-here "  # the space shows whether the template trims the message


class ChatTemplate:
    """Messages to the prompt's text. May be used from any thread."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], lack: str = NO_TEMPLATE) -> None:
        """`special_tokens` maps bos_token, eos_token, … to their text. CheckpointError for malformed Jinja.

        Without a source, `lack` is the answer to every chat.
        """
        self.source = source
        self._lack = lack
        self._special_tokens = dict(special_tokens)
        self._template = None
        self._takes_parts: bool | None = None
        if source is not None:
            try:
                self._template = Sandbox().from_string(source)
            except TemplateSyntaxError as error:
                raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error
            except Exception as error:  # Python's own, of a program that is nested too deeply, say
                raise CheckpointError(f"the chat template cannot be compiled: {type(error).__name__}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text, special tokens included: encode it with `add_special_tokens=False`.

        `kwargs` reach the template as variables. With `continue_final_message` the text ends inside the last
        message. Raises InvalidRequest, with the template's own words when the template refuses.
        """
        if self._template is None:
            raise InvalidRequest(f"{self._lack}; use completions, or start with --chat-template")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        conversation = [self._plain(message) for message in messages]
        variables = {"tools": tools, "documents": None, **kwargs, "add_generation_prompt": add_generation_prompt}
        if not continue_final_message:
            return self._run(conversation, variables)
        return self._continue(conversation, variables)

    def _run(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        assert self._template is not None
        try:
            return self._template.render({**self._special_tokens, **variables, "messages": messages})
        except SecurityError as error:
            raise InvalidRequest(f"the chat template was stopped: {error}", param="messages") from error
        except Refusal as error:
            raise InvalidRequest(str(error), param="messages") from error
        except Exception as error:  # templates fail in any way that expressions can
            raise InvalidRequest(f"the chat template failed: {error}", param="messages") from error

    def _continue(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render with a mark after the last message's text, and cut there."""
        if not messages:
            raise InvalidRequest("continue_final_message needs a message", param="messages")
        content = messages[-1].get("content")
        if isinstance(content, list) and content:
            marked: Any = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]
        elif isinstance(content, str):
            marked = content + _END_MARK
        else:
            raise InvalidRequest("continue_final_message needs text in the last message", param="messages")
        text = self._run([*messages[:-1], {**messages[-1], "content": marked}], variables)
        head, mark, tail = text.rpartition(_END_MARK.rstrip())
        if not mark:
            raise InvalidRequest("the chat template leaves the final message out", param="messages")
        return head if tail.startswith(" ") else head.rstrip()

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message without null fields; text parts as one string (lines) for templates that know no parts."""
        plain = {name: value for name, value in message.items() if value is not None}
        content = plain.get("content")
        if not isinstance(content, list):
            return plain
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise InvalidRequest(f"content parts must be text; got {shown(kind)}", param="messages")
        if not self._template_takes_parts():
            plain["content"] = "\n".join(part["text"] for part in content)
        return plain

    def _template_takes_parts(self) -> bool:
        """Whether a list of parts comes out as its text, rather than as nothing, an error or its notation."""
        if self._takes_parts is None:
            message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
            try:
                text = self._run([message], {"tools": None, "documents": None, "add_generation_prompt": False})
            except InvalidRequest:
                text = ""
            self._takes_parts = _PROBE in text and not any(key in text for key in ("'type'", '"type"'))
        return self._takes_parts
