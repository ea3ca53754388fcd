"""What a model's text means: reasoning, content and tool calls, in pieces or as a whole."""

from collections.abc import Callable

import msgspec

from server.answers.reader import Reader


class DeltaToolCall(msgspec.Struct):
    """A piece of call `index`. The first piece has the id and the name, the others neither."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """The pieces of a call join to JSON text, unless the answer was cut or the model wrote none."""


class DeltaMessage(msgspec.Struct):
    """What some more text adds to an answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[DeltaToolCall] = []
    """In order; at most one piece of each call."""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class ToolCall(msgspec.Struct):
    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct):
    """The sum of deltas."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = []

    def add(self, delta: DeltaMessage) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for piece in delta.tool_calls:
            if piece.id is not None and piece.name is not None:
                self.tool_calls.append(ToolCall(piece.id, piece.name, ""))
            self.tool_calls[piece.index].arguments += piece.arguments


class AnswerReader(Reader):
    """The reader of one answer, and the delta that its parsers make of what they read."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__()
        self.num_calls = 0
        self._make_id = make_id
        self._delta = DeltaMessage()
        self._spaces: list[str] | None = None
        """White space that is content if more content follows, and nothing if a call does; None within content."""

    def expect_calls(self) -> None:
        """Drop white space that touches nothing but calls, or the beginning and a call, from here on."""
        self._spaces = []

    def think(self, text: str) -> None:
        """Add reasoning."""
        self._delta.reasoning += text

    def say(self, text: str) -> None:
        """Add content."""
        if self._spaces is not None:
            self._spaces.append(text)
            if not text or text.isspace():
                return
            text, self._spaces = "".join(self._spaces), None
        self._delta.content += text

    def end_content(self) -> None:
        """Add the white space that waits, where the answer holds no calls."""
        if self._spaces and not self.num_calls:
            self._delta.content += "".join(self._spaces)

    def begin_call(self, name: str) -> None:
        """Add a call, which is what was held."""
        self.release()
        self._delta.tool_calls.append(DeltaToolCall(self.num_calls, self._make_id(), name))
        self.num_calls += 1
        self.expect_calls()

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the latest call."""
        if not self._delta.tool_calls:
            self._delta.tool_calls.append(DeltaToolCall(self.num_calls - 1))
        self._delta.tool_calls[-1].arguments += text
