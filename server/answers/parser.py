"""`AnswerParser`: a model's text, in pieces of any size, to reasoning, content and tool calls."""

from collections.abc import Callable, Mapping
from typing import Any

from server.answers.delta import Answer, AnswerDelta
from server.answers.reader import Reader, Wait
from server.answers.reasoning import ReasoningStyle, read_reasoning
from server.answers.tool_styles import HERMES, ToolStyle
from server.answers.writer import AnswerWriter


class AnswerParser:
    """Parses one answer. However the text is cut into pieces, the deltas sum up to the same `Answer`.

    Nothing waits but what may become a marker, a call's name before its arguments begin, and white space that may
    touch a marker. No text raises.
    """

    def __init__(
        self,
        reasoning: ReasoningStyle | None = None,
        tools: ToolStyle | None = None,
        functions: Mapping[str, dict[str, Any]] | None = None,
        *,
        starts_inside: bool = False,
        only_calls: bool = False,
        make_id: Callable[[], str] | None = None,
    ) -> None:
        """`functions` maps the names offered to their parameters' JSON schemas.

        `starts_inside` is what the reasoning style says of the prompt, `only_calls` whether a grammar lets no content
        be, `make_id` makes ids of calls.
        """
        self._reader = Reader()
        self._writer = AnswerWriter(make_id or (tools or HERMES).make_id)
        self._tools = tools
        self._functions = functions or {}
        self._calls = tools.reader(self._reader, self._writer, self._functions) if tools else None
        if self._calls:
            self._calls.only_calls = only_calls
        self._reasoning = reasoning
        self._starts_inside = starts_inside
        self._plain = reasoning is None and tools is None
        """All that comes is content."""
        self._steps = self._read()

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._writer.num_calls

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> AnswerDelta:
        """What the next piece adds; when it is the last, also what waited. `cut`: it is not where the model ended."""
        if self._plain:
            return AnswerDelta(content=text)
        self._reader.feed(text)
        if ended:
            self._reader.end(cut=cut)
        next(self._steps, None)
        if ended:
            self._writer.end()
        return self._writer.take()

    def finish(self, *, cut: bool = False) -> AnswerDelta:
        """The end, when no more text comes."""
        return self.push("", ended=True, cut=cut)

    def parse(self, text: str, *, cut: bool = False) -> Answer:
        """The whole answer at once."""
        answer = Answer()
        answer.add(self.push(text))
        answer.add(self.finish(cut=cut))
        return answer

    def _read(self) -> Wait[None]:
        if self._reasoning:
            yield from read_reasoning(
                self._reasoning,
                self._reader,
                self._writer,
                starts_inside=self._starts_inside,
                call_markers=self._tools.markers_of_calls if self._tools else (),
                holds_call=self._holds_call,
            )
        if self._calls:
            yield from self._calls.read()
        else:
            self._writer.say(self._reader.take_all())
            self._plain = True

    def _holds_call(self, text: str) -> bool:
        return bool(AnswerParser(None, self._tools, self._functions).parse(text).tool_calls)
