"""One response as it grows, and the events that tell of it. Streamed or not, answers are made here, so they are equal.

created, queued (in the background) or in_progress
for each item:  output_item.added
                for texts:  content_part.added, deltas, done, content_part.done
                for calls:  arguments' deltas, done
                output_item.done
completed, incomplete or failed
"""

import time
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired

import msgspec
from typing_extensions import TypeAliasType, TypedDict

from configs.errors import InvalidRequest
from engine.outputs import OutputBatch
from server.answers.delta import DeltaMessage
from server.chat import Answers
from server.errors import error_object
from server.generation import Generation
from server.logprobs import TokenLogprob, chat_logprobs
from server.openai.responses.models import OutputItem, ReasoningPart, ResponseObject, Status, TextPart, new_id
from server.sse import named_event


class _Event(TypedDict):
    sequence_number: int
    """Counts from 0 through a stream."""


class ResponseEvent(_Event):
    type: Literal[
        "response.created", "response.queued", "response.in_progress",
        "response.completed", "response.incomplete", "response.failed",
    ]  # fmt: skip
    response: ResponseObject


class ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _EventWithin(_Event):
    output_index: int
    item_id: str


class PartEvent(_EventWithin):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: TextPart | ReasoningPart


class TextEvent(_EventWithin):
    """A piece of an item's text or of a call's arguments, and at the end all of it."""

    type: Literal[
        "response.output_text.delta", "response.output_text.done",
        "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
    ]  # fmt: skip
    content_index: NotRequired[int]
    """Texts have one part; calls have none."""
    delta: NotRequired[str]
    text: NotRequired[str]
    """A `done` event has the whole text, or a call's name and arguments."""
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    """Output texts have them, reasoning and calls do not."""


class ErrorEvent(_Event):
    type: Literal["error"]
    code: str
    message: str
    param: str | None


StreamEvent = TypeAliasType("StreamEvent", ResponseEvent | ItemEvent | PartEvent | TextEvent | ErrorEvent)
_INCOMPLETE = {"length": "max_output_tokens", "timeout": "timeout"}
"""Why a response is incomplete, by finish reason."""
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""The names that types of events have for the text of an item."""


class _OpenItem:
    """The last item of the output, to which more may come."""

    def __init__(self, kind: str, index: int, fields: dict[str, Any]) -> None:
        """`index` is the item's place in the output; `fields` are those that a call has from the beginning."""
        own: Any = {"message": {"role": "assistant"}, "reasoning": {"summary": []}, "function_call": {"arguments": ""}}
        self.item: Any = {"type": kind, "id": new_id(kind), "status": "in_progress", **fields, **own[kind]}
        self.part: Any = None
        """The only part of a text; a call has none."""
        if kind != "function_call":
            self.part = {"type": _TEXTS[kind], "text": ""}
            self.part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            self.item["content"] = [self.part]
        self.place = {"output_index": index}
        self.within = {**self.place, "item_id": self.item["id"], **({"content_index": 0} if self.part else {})}
        """Fields of all events within the item."""
        self.pieces: list[str] = []
        """Of the text."""

    def fill(self) -> dict[str, Any]:
        """Write the text so far where it belongs, and return the fields of the text's last event."""
        text = "".join(self.pieces)
        if self.part is None:
            self.item["arguments"] = text
            return {"name": self.item["name"], "arguments": text}
        self.part["text"] = text
        return {name: self.part[name] for name in ("text", "logprobs") if name in self.part}


@dataclass
class ResponseWriter:
    """Writes a response and its events. One item is open at a time."""

    generation: Generation
    answers: Answers
    response: Any
    """A `ResponseObject`, which grows."""
    namespaces: dict[str, tuple[str, str]]
    """Namespace and name of functions, by the names that the model has for them."""
    with_events: bool
    _events: list[bytes] = field(default_factory=list)
    _num_events: int = 0
    _open: _OpenItem | None = None
    _undecided: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of tokens whose text means nothing yet, such as half a marker."""
    _num_reasoning: int = 0

    def __post_init__(self) -> None:
        self._add_response_event("created")
        self._add_response_event(self.response["status"])

    def encoded(self) -> bytes:
        """JSON of the response as it is now."""
        if self._open is not None:
            self._open.fill()
        return msgspec.json.encode(self.response)

    def take(self) -> list[bytes]:
        """The events that nobody has taken yet."""
        taken, self._events = self._events, []
        return taken

    def push(self, batch: OutputBatch) -> None:
        """Add what the engine gives."""
        tokenizer = self.generation.serving.engine.tokenizer
        for _, output in batch:
            self._start()
            self.generation.latest[0] = output
            if output.logprobs:
                self._undecided += chat_logprobs(tokenizer, output.logprobs)["content"]
            if delta := self.answers.delta(0, output):
                self._add(delta)
            if output.finish_reason is not None:
                self._finish(_INCOMPLETE.get(output.finish_reason))

    def fail(self, error: Exception) -> None:
        """End the response with an error, unless it is over."""
        if self.response["usage"]:
            return
        self._start()
        described = error_object(error)
        code = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
        self._close("incomplete")
        self._add_event("error", code=described["code"] or code, message=described["message"], param=described["param"])
        self._end("failed", error={"code": code, "message": described["message"]})

    def cancel(self) -> None:
        """End the response where it is, unless it is over. No event says so: whoever asked knows, or has gone."""
        if not self.response["usage"]:
            self.with_events = False
            self._end("cancelled")

    def _start(self) -> None:
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            self._add_response_event("in_progress")

    def _add_event(self, kind: str, **fields: Any) -> None:
        if self.with_events:
            event = {"type": kind, "sequence_number": self._num_events, **fields}
            self._events.append(named_event(kind, msgspec.json.encode(event)))
            self._num_events += 1

    def _add_response_event(self, kind: str) -> None:
        self._add_event(f"response.{kind}", response=self.response)

    def _add(self, delta: DeltaMessage) -> None:
        """Add what is new, first what a call goes on with: content behind it ends it."""
        calls = delta.tool_calls
        if calls and calls[0].id is None:
            self._add_text("function_call", calls[0].arguments)
            calls = calls[1:]
        if delta.reasoning:
            self._add_text("reasoning", delta.reasoning)
            self._num_reasoning = self.generation.num_output_tokens  # nothing comes before it
        if delta.content:
            opened = self._item("message")
            logprobs = self._undecided if opened.pieces else _last_of(self._undecided, delta.content)
            # encoded once, and not again with each event that has them
            new = [msgspec.Raw(msgspec.json.encode(one)) for one in logprobs]
            opened.part["logprobs"] += new
            self._add_text("message", delta.content, logprobs=new)
        for call in calls:
            namespace, name = self.namespaces.get(call.name or "", (None, call.name))
            space = {"namespace": namespace} if namespace else {}
            self._item("function_call", call_id=call.id, name=name, **space)
            self._add_text("function_call", call.arguments)
        self._undecided = []

    def _add_text(self, kind: str, text: str, **fields: Any) -> None:
        if text:
            opened = self._item(kind)
            opened.pieces.append(text)
            self._add_event(f"response.{_TEXTS[kind]}.delta", **opened.within, delta=text, **fields)

    def _item(self, kind: str, **fields: Any) -> _OpenItem:
        """The open item where it is of this kind, else a new one; each call is a new one, with its `fields`."""
        if self._open is not None and self._open.item["type"] == kind and not fields:
            return self._open
        self._close("completed")
        opened = self._open = _OpenItem(kind, len(self.response["output"]), fields)
        self.response["output"].append(opened.item)
        if opened.part is None:
            self._add_event("response.output_item.added", **opened.place, item=opened.item)
        else:
            self._add_event("response.output_item.added", **opened.place, item={**opened.item, "content": []})
            self._add_event("response.content_part.added", **opened.within, part=opened.part)
        return opened

    def _close(self, status: Status) -> None:
        if (opened := self._open) is None:
            return
        self._open = None
        opened.item["status"] = status
        self._add_event(f"response.{_TEXTS[opened.item['type']]}.done", **opened.within, **opened.fill())
        if opened.part is not None:
            self._add_event("response.content_part.done", **opened.within, part=opened.part)
        self._add_event("response.output_item.done", **opened.place, item=opened.item)

    def _finish(self, incomplete: str | None) -> None:
        """End the response; `incomplete` is the reason where its answer was cut."""
        if self._open is None:
            self._item("message")
        elif self._open.item["type"] == "reasoning":
            self._num_reasoning = self.generation.num_output_tokens
        if incomplete:
            self._end("incomplete", incomplete_details={"reason": incomplete})
        else:
            self._end("completed", completed_at=int(time.time()))

    def _end(self, status: str, **fields: Any) -> None:
        self._close("completed" if status == "completed" else "incomplete")
        generation = self.generation
        num_input, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        usage = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_input + num_output,
        }
        self.response.update(status=status, usage=usage, **fields)
        self._add_response_event(status)


def _last_of(logprobs: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Log-probabilities of the tokens that `text` came with, without those of a marker before it."""
    missing, start = len(text.encode()), len(logprobs)
    while missing > 0 and start > 0:
        start -= 1
        missing -= len(logprobs[start]["bytes"])
    return logprobs[start:]
