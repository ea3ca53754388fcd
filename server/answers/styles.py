"""How models write their answers, and what the model behind a chat template can be told, as the template shows it."""

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from server.answers.calls import AnswerReader, read_elements, read_keywords, read_named, read_object
from server.answers.prompt import Message, one_call_each, plain_tools, with_short_ids
from server.answers.reader import Wait


def random_id() -> str:
    """An id of a call as OpenAI's are."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """An id of nine letters or digits; Mistral's templates take no others."""
    return uuid.uuid4().hex[:9]


class ToolStyle(NamedTuple):
    """One way of writing tool calls: how a template shows it, how calls are read, and how a grammar has them written.

    A grammar has calls written as in `call`, … being the arguments, and all of them together as in `calls`.
    """

    name: str
    sign: str
    """A regular expression for what a chat template holds that teaches the style."""
    read_call: Callable[[AnswerReader], Wait[bool]]
    opening: tuple[str, ...]
    """What nothing but calls begins with. Of these and `bare` none begins another."""
    call: str
    calls: str = "…"
    separator: str = ""
    """Between two calls."""
    trigger: str = ""
    """What free text may not hold without a call behind it; by default, the first call's beginning."""
    bare: tuple[str, ...] = ()
    """What calls may begin with, and ordinary text as well."""
    closing: tuple[str, ...] = ()
    """What ends the calls of one marker; it may be missing at the end of the answer."""
    arguments: Literal["json", "qwen_xml", "keywords"] = "json"
    make_id: Callable[[], str] = random_id

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be special tokens, so text for the parser has to keep those."""
        return self.opening + self.closing


HERMES = ToolStyle(  # Qwen and many others
    name="hermes",
    sign=r"<tool_call>",
    read_call=read_object,
    opening=("<tool_call>",),
    closing=("</tool_call>",),
    call='<tool_call>\n{"name": "NAME", "arguments": …}\n</tool_call>',
    separator="\n",
    trigger="<tool_call>",
)
LLAMA = ToolStyle(  # the answer is an object, or several with semicolons between, or a list of them
    name="llama3_json",
    sign=r'\{\\?"name\\?": [^{}]{1,60}\\?"parameters\\?": ',
    read_call=read_object,
    opening=("<|python_tag|>",),
    bare=("{", "["),
    call='{"name": "NAME", "parameters": …}',
    separator="; ",
    trigger='{"name": ',
)
MISTRAL = ToolStyle(
    name="mistral",
    sign=r"\[TOOL_CALLS\]",
    read_call=read_named,
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
    read_call=read_keywords,
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
    read_call=read_elements,
    bare=("<function=",),
    arguments="qwen_xml",
    call="<tool_call>\n<function=NAME>\n…\n</function>\n</tool_call>",
)
TOOL_STYLES = {
    style.name: style for style in (MISTRAL_NAMED, MISTRAL, QWEN_CODER, HERMES, PYTHONIC_TAGGED, PYTHONIC, LLAMA)
}
"""By name; of those whose signs a template has, the first counts."""


class ReasoningParser(NamedTuple):
    """Answers that begin with a reasoning part between two markers.

    The part is at the answer's beginning or nowhere: later markers are content. Line breaks next to the markers belong
    to them and are dropped, so reasoning neither begins nor ends with one, and content does not begin with one.
    Without the opening marker all is content, without the closing one all is reasoning, up to a tool call.
    """

    opening: str
    closing: str

    def starts_inside(self, prompt: str) -> bool:
        """Whether the prompt ends with the opening marker, so that the answer goes on with reasoning."""
        return prompt.rstrip().endswith(self.opening)

    def is_over(self, prompt: str) -> bool:
        """Whether the prompt has closed the reasoning part already, as templates do for answers without one."""
        return prompt.rstrip().endswith(self.closing)

    def end(self, template: str) -> str:
        """The closing marker with the line breaks that the template writes behind it: one token may hold both."""
        found = re.findall(re.escape(self.closing) + r"((?:\\n){1,2})", template)
        return self.closing + max(found, default="").replace("\\n", "\n")


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
        # with elements of that name, the markers of these styles are another one's
        prints_tools = "<arg_key>" not in template and re.search(r"\{[{%][^{}]*\btools\b", template)
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
