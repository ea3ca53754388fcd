"""`AnswerWriter`: gathers what one push makes of its text."""

from collections.abc import Callable

from server.answers.delta import AnswerDelta, ToolCallDelta


class AnswerWriter:
    def __init__(self, make_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self._make_id = make_id
        self._delta = AnswerDelta()
        self._between_calls = False
        self._spaces: list[str] = []
        """White space that is content if more content follows, and nothing if a call does."""

    def expect_calls(self) -> None:
        """From here on white space that touches nothing but calls, or the beginning and a call, is dropped."""
        self._between_calls = True

    def think(self, text: str) -> None:
        self._delta.reasoning += text

    def say(self, text: str) -> None:
        if self._between_calls:
            self._spaces.append(text)
            if not text or text.isspace():
                return
            text = "".join(self._spaces)
            self._between_calls, self._spaces = False, []
        self._delta.content += text

    def begin_call(self, name: str) -> None:
        self._delta.tool_calls.append(ToolCallDelta(self.num_calls, self._make_id(), name))
        self.num_calls += 1
        self._between_calls, self._spaces = True, []

    def add_arguments(self, text: str) -> None:
        """Of the latest call."""
        if not self._delta.tool_calls:
            self._delta.tool_calls.append(ToolCallDelta(self.num_calls - 1))
        self._delta.tool_calls[-1].arguments += text

    def end(self) -> None:
        """No more content will come."""
        if not self.num_calls:
            self._delta.content += "".join(self._spaces)
        self._spaces = []

    def take(self) -> AnswerDelta:
        delta, self._delta = self._delta, AnswerDelta()
        return delta
