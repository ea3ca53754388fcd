"""A model's text, in pieces of any size, to reasoning, content and tool calls."""

import re
from collections.abc import Callable

import msgspec

from server.answers.calls import Functions, ToolStyle, random_id
from server.answers.delta import Answer, AnswerReader, DeltaMessage
from server.answers.reader import Wait, drop

_BREAKS = re.compile(r"\n+")


class ReasoningParser(msgspec.Struct, frozen=True):
    """Answers that begin with a reasoning part between two markers.

    The part is at the answer's beginning or nowhere: later markers are content. Line breaks next to the markers belong
    to them and are dropped, so reasoning neither begins nor ends with one, and content does not begin with one.
    Without the opening marker all is content, without the closing one all is reasoning, up to a tool call: a model that
    calls a tool without closing its reasoning means to. A call in a part that is closed later is part of it.
    """

    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be special tokens, so text for the parser has to keep those."""
        return self.opening, self.closing

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

    def read(self, answer: "AnswerParser", starts_inside: bool) -> Wait[None]:
        """Read the reasoning part, if there is one, and what separates it from content.

        From the marker of a call on, nothing is known before the part ends: it waits.
        """
        if not (yield from self._read_opening(answer, starts_inside)):
            return
        call_markers = answer.tools.opening if answer.tools else ()
        ends = (self.closing, *call_markers)
        while (yield from answer.until(("\n", *ends), answer.think)):
            breaks = yield from answer.word(_BREAKS)
            found = yield from answer.ahead(ends)
            if found in call_markers:
                answer.hold()
                found = yield from answer.until((self.closing,), drop)
                rest = answer.release()
                if not found and answer.holds_call(rest):
                    answer.unread(rest)
                    return
                answer.think(breaks + (rest.rstrip("\n") if found else rest))
            if found:
                answer.take(len(found))
                yield from answer.span(_BREAKS, drop)
                return
            if (yield from answer.peek()):
                answer.think(breaks)

    def _read_opening(self, answer: "AnswerParser", starts_inside: bool) -> Wait[bool]:
        """Read the opening marker, also once more where the prompt has it. Returns whether reasoning follows."""
        answer.hold()
        yield from answer.spaces()
        opened = yield from answer.literal(self.opening)
        start = answer.release()
        begun = start.lstrip()
        if opened:
            yield from answer.span(_BREAKS, drop)
        elif starts_inside:
            answer.think(start.lstrip("\n"))
        elif not (answer.is_cut_here and len(begun) > 1 and self.opening.startswith(begun)):
            answer.say(start)
            return False
        return True


class AnswerParser(AnswerReader):
    """Parses one answer. However the text is cut into pieces, the deltas sum up to the same `Answer`.

    Nothing waits but what may become a marker, a call's name before its arguments begin, and white space that may
    touch a marker. No text raises.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolStyle | None = None,
        functions: Functions | None = None,
        *,
        starts_inside: bool = False,
        only_calls: bool = False,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """`starts_inside` is what the reasoning parser says of the prompt, `only_calls` whether a grammar lets no
        content be, `make_id` makes ids of calls."""
        super().__init__(make_id or (tools.make_id if tools else random_id))
        self.tools = tools
        self._functions = functions or {}
        self._steps = self._read(reasoning, starts_inside, only_calls)
        self._is_plain = reasoning is None and tools is None
        """All that comes is content."""

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> DeltaMessage:
        """What the next piece adds; with `ended` it is the last, and with `cut` it is not where the model ended."""
        if self._is_plain:
            return DeltaMessage(content=text)
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

    def _read(self, reasoning: ReasoningParser | None, starts_inside: bool, only_calls: bool) -> Wait[None]:
        if reasoning:
            yield from reasoning.read(self, starts_inside)
        if self.tools:
            yield from self.tools.parser(self, self.tools, self._functions, only_calls=only_calls).read()
        else:
            self.say(self.take(len(self._text)))
            self._is_plain = True

    def holds_call(self, text: str) -> bool:
        """Whether there is a call in the text of an answer of this kind."""
        return bool(AnswerParser(None, self.tools, self._functions).parse(text).tool_calls)
