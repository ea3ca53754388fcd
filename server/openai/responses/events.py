"""One response as it grows, and the events that tell of it. Streamed or not, answers are made here, so they are equal.

created, queued (in the background) or in_progress
for each item:  output_item.added
                for texts:  content_part.added, deltas, done, content_part.done
                for calls:  arguments' deltas, done
                output_item.done
completed, incomplete or failed
"""

import time
from typing import Any, Literal, NotRequired

import msgspec
from typing_extensions import TypeAliasType, TypedDict

from configs.errors import InvalidRequest
from engine.outputs import OutputBatch
from server.answers.delta import DeltaMessage, DeltaToolCall
from server.chat import Answers
from server.errors import error_object
from server.generation import Generation
from server.logprobs import TokenLogprob, chat_logprobs, spelling
from server.openai.messages import ToolChoice
from server.openai.responses.models import (
    FunctionTool,
    NamespaceTool,
    OutputItem,
    ReasoningOptions,
    ReasoningPart,
    Status,
    TextOptions,
    TextPart,
    new_id,
)
from server.sse import named_event
from server.structured import STRICT

IncompleteReason = Literal["max_output_tokens", "timeout"]


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(TypedDict):
    reason: IncompleteReason


@STRICT
class ResponseObject(TypedDict):
    """A response as it is at the moment. What the request left out shows the value that was used."""

    id: str
    object: Literal["response"]
    created_at: int
    """Unix seconds."""
    completed_at: int | None
    """Unix seconds."""
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: ToolChoice
    tools: list[FunctionTool | NamespaceTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


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


class PartEvent(_Event):
    type: Literal["response.content_part.added", "response.content_part.done"]
    output_index: int
    item_id: str
    content_index: int
    part: TextPart | ReasoningPart


class TextEvent(_Event):
    """A piece of an item's text or of a call's arguments, and at the end all of it."""

    type: Literal[
        "response.output_text.delta", "response.output_text.done",
        "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
    ]  # fmt: skip
    output_index: int
    item_id: str
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
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_INCOMPLETE: dict[str | None, IncompleteReason] = {"length": "max_output_tokens", "timeout": "timeout"}
"""Why a response is incomplete, by finish reason."""


class _OpenItem:
    """An item to which more may come."""

    def __init__(self, kind: str, index: int, **fields: Any) -> None:
        """`index` is the item's place in the output; `fields` are those that a call has from the beginning."""
        self.kind = kind
        self.is_call = kind == "function_call"
        self.fields = {"id": new_id(_PREFIXES[kind]), **fields}
        self.pieces: list[str] = []
        self.logprobs: list[msgspec.Raw] = []
        """JSON of each token's log-probabilities, so that the events of a long answer do not encode them again."""
        self.within: dict[str, Any] = {"output_index": index, "item_id": self.fields["id"]}
        """Fields of all events within the item."""
        if not self.is_call:
            self.within["content_index"] = 0

    def text(self) -> dict[str, Any]:
        """Fields that say what the item holds, as in its last text event."""
        text = "".join(self.pieces)
        if self.is_call:
            return {"name": self.fields["name"], "arguments": text}
        return {"text": text, "logprobs": self.logprobs} if self.kind == "message" else {"text": text}

    def part(self) -> dict[str, Any]:
        """The only part of a text."""
        return {"type": _TEXTS[self.kind], **self.text()} | ({"annotations": []} if self.kind == "message" else {})

    def item(self, status: Status, *, with_part: bool = True) -> Any:
        item = {"type": self.kind, "status": status, **self.fields}
        if self.is_call:
            return {**item, **self.text()}
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {**item, **own, "content": [self.part()] if with_part else []}


class ResponseWriter:
    """Writes the events of one response, and the whole. One item is open at a time."""

    def __init__(
        self,
        generation: Generation,
        answers: Answers,
        response: ResponseObject,
        namespaces: dict[str, tuple[str, str]],
        *,
        with_events: bool,
    ) -> None:
        """`namespaces` has the namespace and the name of functions by the names that the model has for them."""
        self.generation = generation
        self.response = response
        """The response as it is now, without the item that is open."""
        self.has_begun = False
        self.whole = b""
        """JSON of the response, once it is over."""
        self._answers = answers
        self._tokenizer = generation.serving.engine.tokenizer
        self._spell = spelling(self._tokenizer, None)
        self._namespaces = namespaces
        self._with_events = with_events
        self._events: list[bytes] = []
        self._num_events = 0
        self._open: _OpenItem | None = None
        self._num_undecided = 0
        """Tokens whose text means nothing yet, such as half a marker."""
        self._undecided: list[TokenLogprob] = []
        """Log-probabilities of these tokens."""
        self._num_reasoning = 0

    def events(self, batch: OutputBatch) -> bytes:
        self.push(batch)
        return b"".join(self.take())

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        self.fail(error)
        return b"".join(self.take())

    def take(self) -> list[bytes]:
        """The events that nobody has taken yet."""
        taken, self._events = self._events, []
        return taken

    def encoded(self) -> bytes:
        """JSON of the response as it is now."""
        if self.whole:
            return self.whole
        output = [*self.response["output"], *([self._open.item("in_progress")] if self._open else [])]
        return msgspec.json.encode({**self.response, "output": output})

    def begin(self) -> None:
        self.has_begun = True
        self._add_response_event("created")
        self._add_response_event(self.response["status"])

    def push(self, batch: OutputBatch) -> None:
        for _, output in batch:
            self._start()
            self._num_undecided += output.num_output_tokens - self.generation.num_output_tokens
            self.generation.latest[0] = output
            if output.logprobs:
                self._undecided += chat_logprobs(self._spell, self._tokenizer, output.logprobs)["content"]
            if delta := self._answers.delta(0, output):
                self._add(delta)
            if output.finish_reason is not None:
                self._finish(_INCOMPLETE.get(output.finish_reason))

    def fail(self, error: Exception) -> None:
        """End it with the error. Without effect on a response that is over."""
        if self.whole:
            return
        self._start()
        described = error_object(error)
        message = described["message"]
        code: Any = "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"
        self.response["error"] = {"code": code, "message": message}
        self._end("failed", "incomplete")
        self._add_event("error", code=described["code"] or code, message=message, param=described["param"])
        self._add_response_event("failed")

    def cancel(self) -> None:
        """End it where it is. No event says so: whoever asked knows, or has gone."""
        if not self.whole:
            self._with_events = False
            self._end("cancelled", "incomplete")

    def _start(self) -> None:
        if not self.has_begun:
            self.begin()
        if self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            self._add_response_event("in_progress")

    def _add_event(self, kind: str, **fields: Any) -> None:
        if self._with_events:
            event = {"type": kind, "sequence_number": self._num_events, **fields}
            self._events.append(named_event(kind, msgspec.json.encode(event)))
            self._num_events += 1

    def _add_response_event(self, kind: str) -> None:
        if self._with_events:
            self._add_event(f"response.{kind}", response=msgspec.Raw(self.encoded()))

    def _add(self, delta: DeltaMessage) -> None:
        """A call that goes on comes first: content behind it ends it."""
        calls = delta.tool_calls
        if calls and calls[0].id is None:
            self._add_call(calls[0])
            calls = calls[1:]
        if delta.reasoning:
            self._add_text(self._item("reasoning"), delta.reasoning)
            self._num_reasoning += self._num_undecided
        if delta.content:
            item = self._item("message")
            logprobs = self._undecided if item.pieces else _last_of(self._undecided, delta.content)
            new = [msgspec.Raw(msgspec.json.encode(one)) for one in logprobs]
            item.logprobs += new
            self._add_text(item, delta.content, logprobs=new)
        for call in calls:
            self._add_call(call)
        self._num_undecided, self._undecided = 0, []

    def _add_call(self, piece: DeltaToolCall) -> None:
        if piece.id is not None:
            namespace, name = self._namespaces.get(piece.name or "", (None, piece.name))
            space = {"namespace": namespace} if namespace else {}
            self._item("function_call", call_id=piece.id, name=name, **space)
        if piece.arguments:
            self._add_text(self._item("function_call"), piece.arguments)

    def _add_text(self, item: _OpenItem, text: str, **fields: Any) -> None:
        item.pieces.append(text)
        self._add_event(f"response.{_TEXTS[item.kind]}.delta", **item.within, delta=text, **fields)

    def _item(self, kind: str, **fields: Any) -> _OpenItem:
        """The open item where it is of this kind, else a new one; each call is a new one, with its `fields`."""
        if self._open is not None and self._open.kind == kind and not fields:
            return self._open
        self._close("completed")
        item = self._open = _OpenItem(kind, len(self.response["output"]), **fields)
        begun = item.item("in_progress", with_part=False)
        self._add_event("response.output_item.added", output_index=item.within["output_index"], item=begun)
        if not item.is_call:
            self._add_event("response.content_part.added", **item.within, part=item.part())
        return item

    def _close(self, status: Status) -> None:
        if (item := self._open) is None:
            return
        self._open = None
        self._add_event(f"response.{_TEXTS[item.kind]}.done", **item.within, **item.text())
        if not item.is_call:
            self._add_event("response.content_part.done", **item.within, part=item.part())
        finished = item.item(status)
        self._add_event("response.output_item.done", output_index=item.within["output_index"], item=finished)
        self.response["output"].append(finished)

    def _finish(self, incomplete: IncompleteReason | None) -> None:
        """End the response; `incomplete` is the reason where its answer was cut."""
        if self._open is None:
            self._item("message")
        elif self._open.kind == "reasoning":
            self._num_reasoning += self._num_undecided
        status: Literal["incomplete", "completed"] = "incomplete" if incomplete else "completed"
        self.response["incomplete_details"] = {"reason": incomplete} if incomplete else None
        self.response["completed_at"] = None if incomplete else int(time.time())
        self._end(status, status)
        self._add_response_event(status)

    def _end(self, status: Literal["completed", "incomplete", "failed", "cancelled"], item_status: Status) -> None:
        self._close(item_status)
        self.response["status"] = status
        generation = self.generation
        num_input, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        self.response["usage"] = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_input + num_output,
        }
        self.whole = msgspec.json.encode(self.response)


def _last_of(logprobs: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Those of the tokens that `text` came with, without those of a marker before it."""
    missing, start = len(text.encode()), len(logprobs)
    while missing > 0 and start > 0:
        start -= 1
        missing -= len(logprobs[start]["bytes"])
    return logprobs[start:]
