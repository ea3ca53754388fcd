"""Answers of OpenAI's two generating routes: whole, or in chunks.

What differs between the two is a `Renderer`; ids, usage, the order of chunks and errors are here.
"""

import asyncio
from typing import Any, Protocol

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from configs.settings import ServerConfig
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.disconnect import until_disconnect
from server.errors import openai_error
from server.generation import Generation
from server.protocol.common import (
    GenerationRequest,
    PromptTokensDetails,
    Response,
    StreamOptions,
    Usage,
    UsageField,
)
from server.sse import DONE, EVENT_END, EventStream, event

INLINE_TOKENS = 2000
"""Answers of more tokens are written off the event loop: with log-probabilities one takes up to 20 µs."""


class Renderer(Protocol):
    """Turns outputs into the choices of one route. Lives as long as one response."""

    whole_object: str
    chunk_object: str

    def whole(self, outputs: list[CompletionOutput]) -> list[Any]:
        """The choices of a finished answer."""
        ...

    def chunks(self, index: int, output: RequestOutput) -> list[Any]:
        """Choices for zero or more chunks; the one with a finish reason is the choice's last."""
        ...

    def beside_choices(self, output: CompletionOutput | RequestOutput) -> dict[str, Any]:
        """Fields of the response itself, of a whole answer and of the first chunk."""
        ...


async def respond(
    generation: Generation, body: GenerationRequest, renderer: Renderer, request: Request, headers: dict[str, str]
) -> HttpResponse:
    """The HTTP response; raises what the engine raises before the first token."""
    if body.stream:
        config = generation.serving.config
        writer = ChunkWriter(generation, stream_options(body.stream_options, config), renderer)
        return EventStream(
            generation.run(body.stream_interval), writer, headers, keep_alive=config.sse_keep_alive_interval
        )
    outputs = await until_disconnect(request.receive, generation.whole())
    if sum(len(output.token_ids) for output in outputs) <= INLINE_TOKENS:
        content = _document(generation, renderer, outputs)
    else:
        content = await asyncio.to_thread(_document, generation, renderer, outputs)
    return HttpResponse(content, headers=headers, media_type="application/json")


def _document(generation: Generation, renderer: Renderer, outputs: list[CompletionOutput]) -> bytes:
    whole = _response(generation, renderer.whole_object, renderer.whole(outputs), usage_of(generation))
    return with_fields(msgspec.json.encode(whole), renderer.beside_choices(outputs[0]))


def stream_options(given: StreamOptions | None, config: ServerConfig) -> StreamOptions:
    """With what the server adds."""
    options = given or StreamOptions()
    return msgspec.structs.replace(options, include_usage=True) if config.enable_force_include_usage else options


def usage_of(generation: Generation) -> Usage:
    """What was counted so far."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    cached = PromptTokensDetails(generation.num_cached_tokens)
    return Usage(num_prompt, num_output, num_prompt + num_output, cached)


class ChunkWriter:
    """The events of one generation. What all of its chunks begin and end with is encoded once."""

    def __init__(self, generation: Generation, options: StreamOptions, renderer: Renderer) -> None:
        self.generation = generation
        self.options = options
        self.renderer = renderer
        self.is_first = True
        empty = _response(generation, renderer.chunk_object, [], UNSET)
        self.head, _, self.tail = event(msgspec.json.encode(empty)).rpartition(b"[]")

    def events(self, batch: OutputBatch) -> bytes:
        chunks = []
        usage: UsageField = None if self.options.include_usage else UNSET
        for index, output in batch:
            self.generation.latest[index] = output
            if self.options.continuous_usage_stats:
                usage = usage_of(self.generation)
            for choice in self.renderer.chunks(index, output):
                chunk = self._chunk([choice], usage)
                chunks.append(self._first(chunk, output) if self.is_first else chunk)
        return b"".join(chunks)

    def end(self) -> bytes:
        return (self._chunk([], usage_of(self.generation)) if self.options.include_usage else b"") + DONE

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))

    def _first(self, chunk: bytes, output: RequestOutput) -> bytes:
        self.is_first = False
        return with_fields(chunk.removesuffix(EVENT_END), self.renderer.beside_choices(output)) + EVENT_END

    def _chunk(self, choices: list[Any], usage: UsageField) -> bytes:
        begun = self.head + msgspec.json.encode(choices)
        if usage is not UNSET:
            begun += b',"usage":' + msgspec.json.encode(usage)
        return begun + self.tail


def with_fields(document: bytes, fields: dict[str, Any]) -> bytes:
    """A JSON object with more fields at its end."""
    return document[:-1] + b"," + msgspec.json.encode(fields)[1:] if fields else document


def _response(generation: Generation, kind: str, choices: list[Any], usage: UsageField) -> Response:
    return Response(
        id=generation.id,
        object=kind,
        created=generation.created,
        model=generation.serving.model.id,
        system_fingerprint=generation.serving.system_fingerprint,
        choices=choices,
        usage=usage,
    )
