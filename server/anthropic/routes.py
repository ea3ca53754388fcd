"""POST /v1/messages and /v1/messages/count_tokens, with the answers of Anthropic's Messages API, whole or streamed.

Types of answers have the names that Anthropic's Python package has for them.
"""

from collections.abc import Iterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from engine.outputs import OutputBatch, RequestOutput
from server.answers.delta import DeltaMessage
from server.anthropic.requests import (
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    chat_of,
    tool_use_id,
)
from server.bodies import BodyRoute, ParsedRequest
from server.chat import Answers, render, start_chat
from server.documented import streamed
from server.errors import ErrorResponse, anthropic_error, error_statuses
from server.generation import Generation
from server.serving import ServingOf
from server.sse import EventStream, EventWriter, named_event, until_disconnect
from server.tools import tool_input

router = APIRouter(route_class=BodyRoute, tags=["Anthropic"], responses=error_statuses())

ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class MessageTokensCount(TypedDict):
    input_tokens: int


class MessageUsage(TypedDict):
    """The prompt's tokens are those of `input_tokens` and those that the cache had."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
"""max_tokens also where the time is over."""


class Stop(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None
    """The one of stop_sequences that ended the answer."""


class Message(Stop):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class InputJSONDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class MessageStartEvent(TypedDict):
    type: Literal["message_start"]
    message: Message
    """The answer before its first block."""


class ContentBlockStartEvent(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock
    """The block before its text."""


class ContentBlockDeltaEvent(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputJSONDelta, Field(discriminator="type")]


class ContentBlockStopEvent(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDeltaEvent(TypedDict):
    type: Literal["message_delta"]
    delta: Stop
    usage: MessageUsage


class BareEvent(TypedDict):
    """Says all by its type."""

    type: Literal["message_stop", "ping"]


class MessageErrorEvent(ErrorResponse):
    type: Literal["error"]


Event = (
    MessageStartEvent
    | ContentBlockStartEvent
    | ContentBlockDeltaEvent
    | ContentBlockStopEvent
    | MessageDeltaEvent
    | BareEvent
    | MessageErrorEvent
)


@router.post("/v1/messages", response_model=Message, responses=streamed(Annotated[Event, Field(discriminator="type")]))
async def create_message(body: MessagesRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a chat, in Anthropic's form."""
    generation, answers = await request.prepare(lambda: start_chat(serving, chat_of(body, serving.config), "msg_"))
    request.ignored_fields += generation.passed_over
    writer = MessageWriter(generation, answers, body)
    if body.stream:
        return MessageStream(generation.run(), writer, keep_alive=serving.config.sse_keep_alive_interval)
    content = await until_disconnect(request.receive, writer.whole())
    return Response(content, media_type="application/json")


@router.post("/v1/messages/count_tokens", response_model=MessageTokensCount)
async def count_tokens(body: CountTokensRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Count the tokens of a chat's prompt, in Anthropic's form."""

    async def count() -> MessageTokensCount:
        chat = chat_of(body, serving.config)
        rendered = await render(serving, chat)
        request.ignored_fields += chat.passed_over
        return {"input_tokens": len(rendered.token_ids)}

    return await request.answer(count)


class MessageStream(EventStream):
    comment = named_event("ping", b'{"type":"ping"}')


class MessageWriter(EventWriter):
    """One answer, whole or as events, which are made of the same blocks."""

    def __init__(self, generation: Generation, answers: Answers, body: MessagesRequest) -> None:
        self.generation = generation
        self.answers = answers
        self.body = body
        self.blocks = Blocks()
        self.with_thinking = body.thinking is None or body.thinking.get("display") != "omitted"
        self._stop: Stop = {"stop_reason": None, "stop_sequence": None}

    async def whole(self) -> bytes:
        async with aclosing(self.generation.run(self.generation.longest_interval)) as batches:
            async for batch in batches:
                self._add(batch)
        return msgspec.json.encode(self._message(self.blocks.content))

    def events(self, batch: OutputBatch) -> bytes:
        return b"".join(map(_encoded, self._add(batch)))

    def end(self) -> bytes:
        return _encoded({"type": "message_stop"})

    def error(self, error: Exception) -> bytes:
        return named_event("error", anthropic_error(error))

    def _add(self, batch: OutputBatch) -> list[Event]:
        events: list[Event] = []
        for index, output in batch:
            is_first = self.generation.latest[index] is None
            self.generation.latest[index] = output
            if is_first:
                events.append({"type": "message_start", "message": self._message([])})
            delta = self.answers.delta(index, output)
            if not self.with_thinking:
                delta.reasoning = ""
            events += self.blocks.add(delta)
            if output.finish_reason is not None:
                self._stop = self._stop_of(output, output.finish_reason)
                events += self.blocks.close()
                events.append({"type": "message_delta", "delta": self._stop, "usage": self._usage()})
        return events

    def _stop_of(self, output: RequestOutput, reason: str) -> Stop:
        """Why the answer ends with `output`."""
        if isinstance(output.stop_reason, str) and output.stop_reason in (self.body.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
        reason = self.answers.finish_reason(0, reason)
        was_fitted = self.generation.prompts[0].params.max_tokens != self.body.max_tokens
        reasons: dict[str, StopReason] = {
            "tool_calls": "tool_use",
            "length": "model_context_window_exceeded" if was_fitted else "max_tokens",
            "timeout": "max_tokens",
        }
        return {"stop_reason": reasons.get(reason, "end_turn"), "stop_sequence": None}

    def _message(self, content: list[ContentBlock]) -> Message:
        return {
            "id": self.generation.id,
            "type": "message",
            "role": "assistant",
            "model": self.generation.serving.model.id,
            "content": content,
            **self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> MessageUsage:
        cached = self.generation.num_cached_tokens
        return {
            "input_tokens": self.generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.generation.num_output_tokens,
        }


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By the type of a block: the type of what is added to it, and the field that holds it."""


class Blocks:
    """The content of one answer, block after block, and the events that build it up."""

    def __init__(self) -> None:
        self.content: list[ContentBlock] = []
        """Blocks that are closed."""
        self._open: Any = None
        """A block as it began."""
        self._texts: list[str] = []
        """What came since."""

    def add(self, delta: DeltaMessage) -> list[Event]:
        events: list[Event] = []
        for block, text in _pieces(delta):
            kind = self._open and self._open["type"]
            if block is not None and (block["type"] == "tool_use" or block["type"] != kind):
                events += self.close()
                self._open, self._texts, kind = block, [], block["type"]
                events.append({"type": "content_block_start", "index": len(self.content), "content_block": block})
            if text and kind:
                self._texts.append(text)
                name, field = _DELTAS[kind]
                piece: Any = {"type": name, field: text}
                events.append({"type": "content_block_delta", "index": len(self.content), "delta": piece})
        return events

    def close(self) -> list[Event]:
        if self._open is None:
            return []
        text, kind = "".join(self._texts), self._open["type"]
        self.content.append(self._open | ({"input": tool_input(text)} if kind == "tool_use" else {kind: text}))
        self._open = None
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]


def _pieces(delta: DeltaMessage) -> Iterator[tuple[ContentBlock | None, str]]:
    """The texts in order, each with the block that it begins unless one of its kind is open; None for more of a call.

    What goes on with a call comes first, since nothing may stand within one.
    """
    for call in delta.tool_calls[:1]:
        if call.name is None:
            yield None, call.arguments
    if delta.reasoning:
        yield {"type": "thinking", "thinking": "", "signature": ""}, delta.reasoning
    if delta.content:
        yield {"type": "text", "text": ""}, delta.content
    for call in delta.tool_calls:
        if call.name is not None:
            yield {"type": "tool_use", "id": tool_use_id(call.id or ""), "name": call.name, "input": {}}, call.arguments


def _encoded(event: Event) -> bytes:
    return named_event(event["type"], msgspec.json.encode(event))
