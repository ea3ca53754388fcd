"""How the model behind a chat template writes its answers: its reasoning and tool calls, and what it can be told."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from server.answers.call_history import one_call_each, with_short_ids
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
    takes_one_call: bool
    """The template refuses messages with several calls."""
    takes_short_ids: bool
    """The template refuses ids of calls that are not nine letters or digits."""

    def messages(self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation in the roles and fields that the template has."""
        if not self.knows_developers:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if self.knows_tools or not (tools or has_calls):
            messages = one_call_each(messages) if self.takes_one_call else messages
            return list(with_short_ids(messages) if self.takes_short_ids else messages)
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
        takes_one_call=re.search(r"tool_calls\s*\|\s*length\s*[=!>]=?\s*1\b", template) is not None,
        takes_short_ids=re.search(r"length\s*!=\s*9\b", template) is not None,
    )
