"""How models write tool calls, and which way a chat template teaches."""

import re
import secrets
import string
import uuid
from collections.abc import Callable

import msgspec

from server.answers.call_reader import CallReader
from server.answers.json_calls import HermesCalls, LlamaCalls, MistralCalls
from server.answers.python_calls import PythonCalls
from server.answers.xml_calls import XmlCalls

_ALPHANUMERIC = string.ascii_letters + string.digits


def _long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _mistral_id() -> str:
    """Mistral's templates take no other ids."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class ToolStyle(msgspec.Struct, frozen=True):
    """One way of writing calls. What a grammar needs to write them is in `tool_grammar`."""

    name: str
    reader: type[CallReader]
    make_id: Callable[[], str] = _long_id

    @property
    def markers_of_calls(self) -> tuple[str, ...]:
        """What nothing but a call begins with."""
        return tuple(marker for marker in self.reader.markers if marker not in self.reader.bare)

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be special tokens, so text for the parser has to keep those."""
        closing: tuple[str, ...] = getattr(self.reader, "closing", ())
        return self.markers_of_calls + closing


HERMES = ToolStyle("hermes", HermesCalls)
LLAMA = ToolStyle("llama3_json", LlamaCalls)
MISTRAL = ToolStyle("mistral", MistralCalls, _mistral_id)
MISTRAL_NAMED = ToolStyle("mistral_named", MistralCalls, _mistral_id)
PYTHONIC = ToolStyle("pythonic", PythonCalls)
PYTHONIC_TAGGED = ToolStyle("pythonic_tagged", PythonCalls)
QWEN_CODER = ToolStyle("qwen3_coder", XmlCalls)

TOOL_STYLES = {
    style.name: style for style in (HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, PYTHONIC, PYTHONIC_TAGGED, QWEN_CODER)
}


_SIGNS = (
    (MISTRAL_NAMED, r"\[TOOL_CALLS\].*\[ARGS\]"),
    (MISTRAL, r"\[TOOL_CALLS\]"),
    (QWEN_CODER, r"<tool_call>.*<function="),
    (HERMES, r"<tool_call>"),
    (PYTHONIC_TAGGED, r"<function_calls>"),
    (PYTHONIC, r"func_name1\(|<\|tool_call_start\|>"),
    (LLAMA, r'\{\\?"name\\?": [^{}]{1,60}\\?"parameters\\?": '),
)
"""What a template holds that teaches the style; the first counts."""

_UNREAD = "<arg_key>"
"""What a template holds that uses the markers of these styles for another one."""


def detect_tools(template: str) -> ToolStyle:
    """The template's style, and Hermes for templates that teach none that we read, see `tool_prompt`."""
    return _taught_style(template) or HERMES


def template_knows_tools(template: str) -> bool:
    """Whether the template prints a request's tools and teaches a style that we read."""
    return _taught_style(template) is not None


def _taught_style(template: str) -> ToolStyle | None:
    if _UNREAD in template or not re.search(r"\{[{%][^{}]*\btools\b", template):
        return None
    return next((style for style, sign in _SIGNS if re.search(sign, template, re.DOTALL)), None)
