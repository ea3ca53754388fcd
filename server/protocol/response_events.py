"""Events of a streamed response, in the order of a stream:

created, queued (in the background) or in_progress
for each item:  output_item.added
                for texts:  content_part.added, deltas, done, content_part.done
                for calls:  arguments' deltas, done
                output_item.done
completed, incomplete or failed
"""

import msgspec

from server.logprobs import TokenLogprob
from server.protocol.response_items import OutputItem, OutputText, ReasoningText
from server.protocol.responses import Response


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`type` names the event; `sequence_number` counts from 0 through a stream."""

    type: str
    sequence_number: int


class ResponseEvent(Event, frozen=True, kw_only=True):
    """response.created, .queued, .in_progress, .completed, .incomplete and .failed."""

    response: Response


class ItemEvent(Event, frozen=True, kw_only=True):
    """response.output_item.added and .done."""

    output_index: int
    item: OutputItem


class WithinItem(Event, frozen=True, kw_only=True):
    output_index: int
    item_id: str


class PartEvent(WithinItem, frozen=True, kw_only=True):
    """response.content_part.added and .done."""

    content_index: int = 0
    part: OutputText | ReasoningText


class ReasoningDelta(WithinItem, frozen=True, kw_only=True):
    content_index: int = 0
    delta: str


class ReasoningDone(WithinItem, frozen=True, kw_only=True):
    content_index: int = 0
    text: str


class TextDelta(WithinItem, frozen=True, kw_only=True):
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(WithinItem, frozen=True, kw_only=True):
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob]


class ArgumentsDelta(WithinItem, frozen=True, kw_only=True):
    delta: str


class ArgumentsDone(WithinItem, frozen=True, kw_only=True):
    name: str
    arguments: str


class ErrorEvent(Event, frozen=True, kw_only=True):
    code: str | None
    message: str
    param: str | None
