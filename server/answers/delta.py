"""What a model's text means, as pieces and as their sum: reasoning, content and tool calls."""

import msgspec


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
