"""How the model behind a chat template writes its answers: its reasoning and tool calls, and what it can be told."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from server.answers.reasoning import THINK, ReasoningStyle, detect_reasoning
from server.answers.tool_prompt import plain_tools, takes_system_messages
from server.answers.tool_styles import TOOL_STYLES, ToolStyle, detect_tools, template_knows_tools


class AnswerStyle(NamedTuple):
    tools: ToolStyle
    reasoning: ReasoningStyle | None
    knows_tools: bool
    """The template prints tools, calls and their results itself."""
    knows_developers: bool
    """The template has a role of that name."""
    takes_system_messages: bool

    def messages(self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation in the roles and fields that the template has."""
        if not self.knows_developers:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if self.knows_tools or not (tools or has_calls):
            return list(messages)
        return plain_tools(messages, tools, system_role=self.takes_system_messages)


@lru_cache(maxsize=64)
def style_of(template: str, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> AnswerStyle:
    """By the template's source; the two settings are those of `ServerConfig`."""
    detected = detect_reasoning(template)
    return AnswerStyle(
        tools=detect_tools(template) if tool_call_parser == "auto" else TOOL_STYLES[tool_call_parser],
        reasoning={"auto": detected, "none": None, "think": THINK}[reasoning_parser],
        knows_tools=template_knows_tools(template),
        knows_developers="developer" in template,
        takes_system_messages=takes_system_messages(template),
    )
