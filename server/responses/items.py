"""Output items while they grow, and the events that tell of it."""

from typing import Any

from msgspec import UnsetType

from server.convert.response_items import new_id
from server.logprobs import TokenLogprob
from server.protocol.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemEvent,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from server.protocol.response_items import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)


class EventLog:
    """Numbers the events of one response, and holds those that nobody took yet."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._count = 0

    def add(self, event: type[Event], kind: str, **fields: Any) -> None:
        self._events.append(event(type=kind, sequence_number=self._count, **fields))
        self._count += 1

    def take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken


class OpenItem:
    """An item to which more may come. `index` is its place in the output."""

    prefix: str

    def __init__(self, log: EventLog, index: int) -> None:
        self.log = log
        self.index = index
        self.id = new_id(self.prefix)
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def item(self, status: Status) -> OutputItem:
        raise NotImplementedError

    def close(self, status: Status) -> OutputItem:
        """The finished item."""
        item = self.item(status)
        self.log.add(ItemEvent, "response.output_item.done", output_index=self.index, item=item)
        return item

    def _begin(self, item: OutputItem) -> None:
        self.log.add(ItemEvent, "response.output_item.added", output_index=self.index, item=item)

    def _tell(self, event: type[Event], kind: str, **fields: Any) -> None:
        self.log.add(event, f"response.{kind}", output_index=self.index, item_id=self.id, **fields)


class OpenMessage(OpenItem):
    prefix = "msg"

    def __init__(self, log: EventLog, index: int) -> None:
        super().__init__(log, index)
        self.logprobs: list[TokenLogprob] = []
        self._begin(MessageItem(id=self.id, status="in_progress", role="assistant", content=[]))
        self._tell(PartEvent, "content_part.added", part=OutputText(""))

    def add(self, text: str, logprobs: list[TokenLogprob]) -> None:
        self.pieces.append(text)
        self.logprobs += logprobs
        self._tell(TextDelta, "output_text.delta", delta=text, logprobs=logprobs)

    def item(self, status: Status) -> MessageItem:
        content = [OutputText(self.text, logprobs=list(self.logprobs))]
        return MessageItem(id=self.id, status=status, role="assistant", content=list(content))

    def close(self, status: Status) -> OutputItem:
        part = OutputText(self.text, logprobs=self.logprobs)
        self._tell(TextDone, "output_text.done", text=self.text, logprobs=self.logprobs)
        self._tell(PartEvent, "content_part.done", part=part)
        return super().close(status)


class OpenReasoning(OpenItem):
    prefix = "rs"

    def __init__(self, log: EventLog, index: int) -> None:
        super().__init__(log, index)
        self._begin(ReasoningItem(id=self.id, status="in_progress", content=[]))
        self._tell(PartEvent, "content_part.added", part=ReasoningText(""))

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self._tell(ReasoningDelta, "reasoning_text.delta", delta=text)

    def item(self, status: Status) -> ReasoningItem:
        return ReasoningItem(id=self.id, status=status, content=[ReasoningText(self.text)])

    def close(self, status: Status) -> OutputItem:
        self._tell(ReasoningDone, "reasoning_text.done", text=self.text)
        self._tell(PartEvent, "content_part.done", part=ReasoningText(self.text))
        return super().close(status)


class OpenCall(OpenItem):
    prefix = "fc"

    def __init__(self, log: EventLog, index: int, call_id: str, name: str, namespace: str | UnsetType) -> None:
        super().__init__(log, index)
        self.call_id = call_id
        self.name = name
        self.namespace = namespace
        self._begin(self.item("in_progress"))

    def add(self, arguments: str) -> None:
        self.pieces.append(arguments)
        self._tell(ArgumentsDelta, "function_call_arguments.delta", delta=arguments)

    def item(self, status: Status) -> FunctionCallItem:
        return FunctionCallItem(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.name,
            namespace=self.namespace,
            arguments=self.text,
        )

    def close(self, status: Status) -> OutputItem:
        self._tell(ArgumentsDone, "function_call_arguments.done", name=self.name, arguments=self.text)
        return super().close(status)
