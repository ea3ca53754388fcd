"""Answers that begin with a reasoning part between two markers.

The part is at the answer's beginning or nowhere: later markers are content. Line breaks next to the markers belong to
them and are dropped, so reasoning neither begins nor ends with one, and content does not begin with one.
Without the opening marker all is content, without the closing one all is reasoning, up to a tool call: a model that
calls a tool without closing its reasoning means to. A call in a part that is closed later is part of it.
"""

import re
from collections.abc import Callable

import msgspec

from server.answers.reader import Reader, Wait, drop
from server.answers.writer import AnswerWriter

_BREAKS = re.compile(r"\n+")
_TAIL = 64
"""Characters of a prompt that may hold a marker and white space behind it."""


class ReasoningStyle(msgspec.Struct, frozen=True):
    """The markers. They may be special tokens, so text for the parser has to keep those."""

    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.closing

    def starts_inside(self, prompt: str) -> bool:
        """Whether the prompt, or its tail, ends with the opening marker: the answer goes on with reasoning."""
        return prompt[-_TAIL:].rstrip().endswith(self.opening)

    def end(self, template: str) -> str:
        """The closing marker with the line breaks that the template writes behind it: one token may hold both."""
        found = re.findall(re.escape(self.closing) + r"((?:\\n){1,2})", template)
        return self.closing + max(found, default="").replace("\\n", "\n")

    def is_over(self, prompt: str) -> bool:
        """Whether the prompt has closed the reasoning part already, as templates do for answers without one."""
        return prompt[-_TAIL:].rstrip().endswith(self.closing)


THINK = ReasoningStyle("<think>", "</think>")
REASONING_STYLES = (
    THINK,
    ReasoningStyle("[THINK]", "[/THINK]"),
    ReasoningStyle("<reasoning>", "</reasoning>"),
    ReasoningStyle("<thinking>", "</thinking>"),
)


def detect_reasoning(template: str) -> ReasoningStyle | None:
    """By the closing marker: templates cut earlier reasoning off there, and some never write the opening one."""
    return next((style for style in REASONING_STYLES if style.closing in template), None)


def read_reasoning(
    style: ReasoningStyle,
    reader: Reader,
    writer: AnswerWriter,
    *,
    starts_inside: bool,
    call_markers: tuple[str, ...] = (),
    holds_call: Callable[[str], bool] = lambda text: False,
) -> Wait[None]:
    """Read the reasoning part, if there is one, and what separates it from content.

    From one of `call_markers` on, nothing is known before the part ends: it waits.
    """
    reader.hold()
    yield from reader.spaces()
    opened = yield from reader.literal(style.opening)
    start = reader.release()
    if opened:  # once more where the prompt has opened it, as some models do
        yield from reader.span(_BREAKS, drop)
    elif starts_inside:
        writer.think(start.lstrip("\n"))
    elif not (reader.is_cut_here and len(start.lstrip()) > 1 and style.opening.startswith(start.lstrip())):
        writer.say(start)
        return
    ends = (style.closing, *call_markers)
    while (yield from reader.until(("\n", *ends), writer.think)):
        breaks = yield from reader.word(_BREAKS)
        found = yield from reader.ahead(ends)
        if found in call_markers:
            reader.hold()
            found = yield from reader.until((style.closing,), drop)
            rest = reader.release()
            if not found and holds_call(rest):
                reader.unread(rest)
                return
            writer.think(breaks + (rest.rstrip("\n") if found else rest))
        if found:
            reader.take(len(found))
            yield from reader.span(_BREAKS, drop)
            return
        if (yield from reader.peek()):
            writer.think(breaks)
