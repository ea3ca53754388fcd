"""How the model behind a chat template writes its answers, and what it can be told, as far as the template shows it."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from server.answers.calls import JsonToolParser, MistralToolParser, PythonToolParser, ToolStyle, short_id
from server.answers.parser import ReasoningParser
from server.answers.prompt import Message, one_call_each, plain_tools, with_short_ids
from server.answers.xml_calls import XmlToolParser

HERMES = ToolStyle(  # Qwen and many others
    name="hermes",
    sign=r"<tool_call>",
    parser=JsonToolParser,
    opening=("<tool_call>",),
    closing=("</tool_call>",),
    call='<tool_call>\n{"name": "NAME", "arguments": …}\n</tool_call>',
    separator="\n",
    trigger="<tool_call>",
)
LLAMA = ToolStyle(  # the answer is an object, or several with semicolons between, or a list of them
    name="llama3_json",
    sign=r'\{\\?"name\\?": [^{}]{1,60}\\?"parameters\\?": ',
    parser=JsonToolParser,
    opening=("<|python_tag|>",),
    bare=("{", "["),
    call='{"name": "NAME", "parameters": …}',
    separator="; ",
    trigger='{"name": ',
)
MISTRAL = ToolStyle(
    name="mistral",
    sign=r"\[TOOL_CALLS\]",
    parser=MistralToolParser,
    opening=("[TOOL_CALLS]",),
    call='{"name": "NAME", "arguments": …}',
    calls="[TOOL_CALLS][…]",
    separator=", ",
    trigger="[TOOL_CALLS]",
    make_id=short_id,
)
MISTRAL_NAMED = MISTRAL._replace(
    name="mistral_named",
    sign=r"\[TOOL_CALLS\].*\[ARGS\]",
    call="[TOOL_CALLS]NAME[ARGS]…",
    calls="…",
    separator="",
)
PYTHONIC = ToolStyle(  # Llama 3.2 and 4, LFM2
    name="pythonic",
    sign=r"func_name1\(|<\|tool_call_start\|>",
    parser=PythonToolParser,
    opening=("<function_calls>", "<|python_tag|>", "<|python_start|>", "<|tool_call_start|>"),
    bare=("[",),
    closing=("</function_calls>", "<|python_end|>", "<|tool_call_end|>"),
    arguments="keywords",
    call="NAME(…)",
    calls="[…]",
    separator=", ",
)
PYTHONIC_TAGGED = PYTHONIC._replace(  # OLMo
    name="pythonic_tagged",
    sign=r"<function_calls>",
    calls="<function_calls>\n…\n</function_calls>",
    separator="\n",
    trigger="<function_calls>",
)
QWEN_CODER = HERMES._replace(
    name="qwen3_coder",
    sign=r"<tool_call>.*<function=",
    parser=XmlToolParser,
    bare=("<function=",),
    arguments="qwen_xml",
    call="<tool_call>\n<function=NAME>\n…\n</function>\n</tool_call>",
)
TOOL_STYLES = {
    style.name: style for style in (MISTRAL_NAMED, MISTRAL, QWEN_CODER, HERMES, PYTHONIC_TAGGED, PYTHONIC, LLAMA)
}
"""By name; of those whose signs a template has, the first counts."""
_UNREAD = "<arg_key>"
"""What a template holds that uses the markers of these styles for another one."""

THINK = ReasoningParser("<think>", "</think>")
REASONING_PARSERS = (
    THINK,
    ReasoningParser("[THINK]", "[/THINK]"),
    ReasoningParser("<reasoning>", "</reasoning>"),
    ReasoningParser("<thinking>", "</thinking>"),
)


class AnswerStyle:
    """What a chat template's source says of the model's answers, and what it takes."""

    def __init__(self, template: str, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        """The two parsers are the settings of `ServerConfig`.

        Templates that teach no tool style get the Hermes style, which `plain_tools` describes.
        """
        prints_tools = _UNREAD not in template and re.search(r"\{[{%][^{}]*\btools\b", template)
        styles = TOOL_STYLES.values() if prints_tools else ()
        taught = next((style for style in styles if re.search(style.sign, template, re.DOTALL)), None)
        self.tools = (taught or HERMES) if tool_call_parser == "auto" else TOOL_STYLES[tool_call_parser]
        # templates cut earlier reasoning off at the closing marker, and some never write the opening one
        detected = next((parser for parser in REASONING_PARSERS if parser.closing in template), None)
        self.reasoning = {"auto": detected, "none": None, "think": THINK}[reasoning_parser]
        self.knows_tools = taught is not None
        """Whether the template prints tools, calls and their results itself."""
        self.knows_developers = "developer" in template
        """Whether the template has a role of that name."""
        self.takes_system_messages = "System role not supported" not in template
        self.takes_one_call = re.search(r"tool_calls\s*\|\s*length\s*[=!>]=?\s*1\b", template) is not None
        """Whether the template refuses messages with several calls."""
        self.takes_short_ids = re.search(r"length\s*!=\s*9\b", template) is not None
        """Whether the template refuses ids of calls that are not nine letters or digits."""

    def messages(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
        """The conversation in the roles and fields that the template has."""
        if not self.knows_developers:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        if not self.knows_tools and (tools or has_calls):
            return plain_tools(messages, tools, system_role=self.takes_system_messages)
        messages = one_call_each(messages) if self.takes_one_call else messages
        return with_short_ids(messages) if self.takes_short_ids else messages


style_of = lru_cache(maxsize=64)(AnswerStyle)
