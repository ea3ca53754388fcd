"""A model's text, in pieces of any size, to reasoning, content and tool calls."""

import re

from server.answers.calls import AnswerReader, Functions
from server.answers.delta import Answer, DeltaMessage
from server.answers.reader import Wait, drop
from server.answers.styles import ReasoningParser, ToolStyle, random_id

_BREAKS = re.compile(r"\n+")
_BRACES = re.compile(r"\}+")


class AnswerParser(AnswerReader):
    """Parses one answer. However the text is cut into pieces, the deltas sum up to the same `Answer`.

    Nothing waits but what may become a marker, a call's name before its arguments begin, and white space that may
    touch a marker. A candidate that turns out to be no call is content, character for character, or nothing where the
    end of a cut answer breaks it off. No text raises.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolStyle | None = None,
        functions: Functions | None = None,
        *,
        starts_inside: bool = False,
        only_calls: bool = False,
    ) -> None:
        """`starts_inside` is what the reasoning parser says of the prompt, `only_calls` whether a grammar lets no
        content be."""
        super().__init__(functions or {}, tools.make_id if tools else random_id)
        self._tools = tools
        self._only_calls = only_calls
        self._steps = self._read(reasoning, starts_inside)

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> DeltaMessage:
        """What the next piece adds; with `ended` it is the last, and with `cut` it is not where the model ended."""
        self._text, self._at = self._text[self._at :] + text, 0
        self._ended, self._is_cut = ended, cut
        next(self._steps, None)
        delta, self._delta = self._delta, DeltaMessage()
        return delta

    def parse(self, text: str, *, cut: bool = False) -> Answer:
        """The whole answer at once."""
        answer = Answer()
        answer.add(self.push(text, ended=True, cut=cut))
        return answer

    def _read(self, reasoning: ReasoningParser | None, starts_inside: bool) -> Wait[None]:
        if reasoning and (yield from self._read_opening(reasoning.opening, starts_inside)):
            yield from self._read_reasoning(reasoning.closing)
        if self._tools:
            yield from self._read_content(self._tools)
            return
        while True:
            self.say(self.take(len(self._text)))
            yield

    def _read_opening(self, opening: str, starts_inside: bool) -> Wait[bool]:
        """Read the opening marker, also once more where the prompt has it. Returns whether reasoning follows."""
        self.hold()
        yield from self.spaces()
        opened = yield from self.literal(opening)
        start = self.release()
        begun = start.lstrip()
        if opened:
            yield from self.span(_BREAKS, drop)
        elif starts_inside:
            self.think(start.lstrip("\n"))
        elif not (self.is_cut_here and len(begun) > 1 and opening.startswith(begun)):
            self.say(start)
            return False
        return True

    def _read_reasoning(self, closing: str) -> Wait[None]:
        """Read the reasoning part and what separates it from content.

        From the marker of a call on, nothing is known before the part ends: it waits. A model that calls a tool without
        closing its reasoning means to; a call in a part that is closed later is part of it.
        """
        call_markers = self._tools.opening if self._tools else ()
        ends = (closing, *call_markers)
        while (yield from self.until(("\n", *ends), self.think)):
            breaks = yield from self.word(_BREAKS)
            found = yield from self.ahead(ends)
            if found in call_markers:
                self.hold()
                found = yield from self.until((closing,), drop)
                rest = self.release()
                if not found and AnswerParser(None, self._tools, self.functions).parse(rest).tool_calls:
                    self.unread(rest)
                    return
                self.think(breaks + (rest.rstrip("\n") if found else rest))
            if found:
                self.take(len(found))
                yield from self.span(_BREAKS, drop)
                return
            if (yield from self.peek()):
                self.think(breaks)

    def _read_content(self, style: ToolStyle) -> Wait[None]:
        """Read content with calls in it to the answer's end."""
        self._spaces = []
        while marker := (yield from self.until(style.opening + style.bare, self.say)):
            self.is_bare = marker in style.bare
            self.hold()
            if not self.is_bare:
                self.take(len(marker))
            if (yield from self._read_calls(style)):
                self.release()
                continue
            yield from self.peek()  # whether a cut answer ends here tells what was held
            rest = self.release()
            means_a_call = (
                self._only_calls or not self.is_bare or any(name in rest for name in ('"name"', *self.functions))
            )
            if not (self.is_cut_here and means_a_call):
                self.say(rest)
        if self._spaces and not self.num_calls:
            self._delta.content += "".join(self._spaces)

    def _read_calls(self, style: ToolStyle) -> Wait[bool]:
        """Read the calls behind a marker. Text held at the end was none, unless this returns True."""
        in_list = yield from self.token("[")
        while True:
            self.begun = False
            if not (yield from style.read_call(self)):
                return False
            self.hold()
            yield from self.token(",", ";")
            yield from self.span(_BRACES, drop)  # one too many is a common slip
            yield from self.spaces()
            if in_list and (yield from self.literal("]")):
                if style.closing and not self.is_bare:
                    yield from self.spaces()
                    yield from self.literal(*style.closing, or_end=True)
                return True
            if (yield from self.literal(*style.closing, or_end=True)):
                return True
            if style.arguments != "keywords" and (yield from self.peek()) != "{":
                return False
