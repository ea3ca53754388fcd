"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from collections.abc import Callable, Iterator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from configs.settings import ServerConfig
from engine.input_processor import RenderedChat
from engine.outputs import OutputBatch, RequestOutput
from server.answers.delta import DeltaMessage
from server.chat import Answers, Chat, render, start_chat
from server.convert.messages import chat_of, tool_use_id
from server.convert.tool_input import tool_input
from server.disconnect import until_disconnect
from server.errors import anthropic_error
from server.generation import Generation
from server.parsing import BodyParser, ignored_header
from server.protocol.messages import (
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CountTokensRequest,
    Event,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
)
from server.serving import serving_of
from server.sse import EventStream, event


class MessagesRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(MessagesRequest, config)

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)
        generation, answers = await serving.preparation.prepare(
            request, lambda: start_chat(serving, chat_of(body, serving.config), "msg_")
        )
        writing = MessageWriter(generation, answers, body)
        headers = ignored_header(parsed.ignored_fields + generation.passed_over)
        if body.stream:
            interval = serving.config.sse_keep_alive_interval
            return MessageStream(generation.run(), writing, headers, keep_alive=interval)
        message = await until_disconnect(request.receive, writing.whole())
        return Response(msgspec.json.encode(message), headers=headers, media_type="application/json")


class CountTokensRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(CountTokensRequest, config)

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        serving.check_model(parsed.body.model)

        async def start() -> tuple[RenderedChat, Chat]:
            chat = chat_of(parsed.body, serving.config)
            return await render(serving, chat), chat

        rendered, chat = await serving.preparation.prepare(request, start)
        content = msgspec.json.encode(TokenCount(len(rendered.token_ids)))
        headers = ignored_header([*parsed.ignored_fields, *chat.passed_over])
        return Response(content, headers=headers, media_type="application/json")


class MessageStream(EventStream):
    comment = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageWriter:
    """One answer, whole or as events; both are made of the same blocks."""

    def __init__(self, generation: Generation, answers: Answers, body: MessagesRequest) -> None:
        self.generation = generation
        self.answers = answers
        self.body = body
        self.blocks = Blocks()
        self.with_thinking = body.thinking is None or body.thinking.display != "omitted"

    async def whole(self) -> Message:
        stop = None
        async with aclosing(self.generation.run()) as batches:
            async for batch in batches:
                for index, output in batch:
                    self._add(index, output)
                    stop = self._stop(output) or stop
        return self._message(self.blocks.content(), stop)

    def events(self, batch: OutputBatch) -> bytes:
        events: list[Event] = []
        for index, output in batch:
            if self.generation.latest[index] is None:
                self.generation.latest[index] = output
                events.append(MessageStart(self._message([], None)))
            events += self._add(index, output)
            if stop := self._stop(output):
                events += self.blocks.close()
                events.append(MessageDelta(stop, self._usage()))
        return b"".join(map(encoded, events))

    def end(self) -> bytes:
        return encoded(MessageStop())

    def error(self, error: Exception) -> bytes:
        return b"event: error\n" + event(anthropic_error(error))

    def _add(self, index: int, output: RequestOutput) -> list[Event]:
        self.generation.latest[index] = output
        delta = self.answers.delta(index, output)
        if not self.with_thinking:
            delta.reasoning = ""
        return self.blocks.add(delta)

    def _stop(self, output: RequestOutput) -> Stop | None:
        """Why the answer ends with `output`."""
        if output.finish_reason is None:
            return None
        if isinstance(output.stop_reason, str) and output.stop_reason in (self.body.stop_sequences or ()):
            return Stop("stop_sequence", output.stop_reason)
        reason = self.answers.finish_reason(0, output.finish_reason)
        if reason == "timeout":
            return Stop("max_tokens", None)
        if reason == "length":
            fitted = self.generation.prompts[0].params.max_tokens != self.body.max_tokens
            return Stop("model_context_window_exceeded" if fitted else "max_tokens", None)
        return Stop("tool_use" if reason == "tool_calls" else "end_turn", None)

    def _message(self, content: list[Block], stop: Stop | None) -> Message:
        return Message(
            id=self.generation.id,
            model=self.generation.serving.model.id,
            content=content,
            stop_reason=stop.stop_reason if stop else None,
            stop_sequence=stop.stop_sequence if stop else None,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        cached = self.generation.num_cached_tokens
        return MessageUsage(
            input_tokens=self.generation.num_prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=self.generation.num_output_tokens,
        )


class Blocks:
    """The content of one answer, block after block, and the events that build it up."""

    def __init__(self) -> None:
        self._begun: list[tuple[Block, list[str]]] = []
        """Blocks as they began and the texts that came since; the last one is open."""

    def add(self, delta: DeltaMessage) -> list[Event]:
        events: list[Event] = []
        for block, text in pieces(delta):
            is_more = block is None or (isinstance(block, TextBlock | ThinkingBlock) and self._is_open(type(block)))
            if block is not None and not is_more:
                events += self.close()
                events.append(ContentBlockStart(len(self._begun), block))
                self._begun.append((block, []))
            if text:
                opened, texts = self._begun[-1]
                texts.append(text)
                events.append(ContentBlockDelta(len(self._begun) - 1, _DELTAS[type(opened)](text)))
        return events

    def close(self) -> list[Event]:
        return [ContentBlockStop(len(self._begun) - 1)] if self._begun else []

    def content(self) -> list[Block]:
        return [_filled(block, "".join(texts)) for block, texts in self._begun]

    def _is_open(self, kind: type[Block]) -> bool:
        return bool(self._begun) and type(self._begun[-1][0]) is kind


def pieces(delta: DeltaMessage) -> Iterator[tuple[Block | None, str]]:
    """Texts in order, each with the block that it begins unless one of its kind is open; None: with the open one.

    What goes on with a call comes first, since nothing may stand within one.
    """
    for call in delta.tool_calls[:1]:
        if call.name is None:
            yield None, call.arguments
    if delta.reasoning:
        yield ThinkingBlock(thinking=""), delta.reasoning
    if delta.content:
        yield TextBlock(text=""), delta.content
    for call in delta.tool_calls:
        if call.name is not None:
            yield ToolUseBlock(id=tool_use_id(call.id or ""), name=call.name, input={}), call.arguments


def encoded(one: Event) -> bytes:
    return b"event: " + str(one.__struct_config__.tag).encode() + b"\n" + event(msgspec.json.encode(one))


def _filled(block: Block, text: str) -> Block:
    if isinstance(block, TextBlock):
        return TextBlock(text=text)
    if isinstance(block, ThinkingBlock):
        return ThinkingBlock(thinking=text)
    return ToolUseBlock(id=block.id, name=block.name, input=tool_input(text))


_DELTAS: dict[type[Block], Callable[[str], TextDelta | ThinkingDelta | InputJsonDelta]] = {
    TextBlock: TextDelta,
    ThinkingBlock: ThinkingDelta,
    ToolUseBlock: InputJsonDelta,
}
