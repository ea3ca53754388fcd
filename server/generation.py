"""One generating request: its choices run, and are answered whole or in chunks.

What differs between the two routes is a `Renderer`; ids, usage, the order of chunks and errors are here.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from configs.sampling import SamplingParams
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.disconnect import until_disconnect
from server.http_errors import error_body
from server.protocol.common import (
    GenerationRequest,
    PromptTokensDetails,
    Response,
    StreamOptions,
    Usage,
    UsageField,
)
from server.serving import Serving
from server.sse import DONE, EventStream, event


class Renderer(Protocol):
    """Turns outputs into the choices of one route. Lives as long as one response."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, output: CompletionOutput) -> Any:
        """A finished choice."""
        ...

    def chunks(self, index: int, output: RequestOutput) -> list[Any]:
        """Choices for zero or more chunks; the one with a finish reason is the choice's last."""
        ...


class Generation:
    """The choices of one request. Choice `prompt * n + j` is the j-th of its prompt."""

    def __init__(
        self,
        serving: Serving,
        body: GenerationRequest,
        prompts: list[tuple[list[int], SamplingParams]],
        renderer: Renderer,
    ) -> None:
        self.serving = serving
        self.body = body
        self.prompts = prompts
        self.renderer = renderer
        self.n = prompts[0][1].n
        self.id = renderer.id_prefix + uuid.uuid4().hex
        self.created = int(time.time())
        self.latest: list[RequestOutput | None] = [None] * (len(prompts) * self.n)
        """Of each choice; it holds the choice's counts."""

    async def respond(self, request: Request, ignored_fields: list[str]) -> HttpResponse:
        """The HTTP response; raises what the engine raises before the first token."""
        headers = _ignored_header(ignored_fields)
        if self.body.stream:
            return EventStream(self._generate(), ChunkWriter(self), headers)
        whole = await until_disconnect(request.receive, self.whole())
        return HttpResponse(msgspec.json.encode(whole), headers=headers, media_type="application/json")

    async def whole(self) -> Response:
        outputs = [CompletionOutput(index) for index in range(len(self.latest))]
        async with aclosing(self._generate()) as batches:
            async for batch in batches:
                for index, output in batch:
                    self.latest[index] = output
                    outputs[index].extend(output)
        choices = [self.renderer.whole(output) for output in outputs]
        return self.response(self.renderer.whole_object, choices, self.usage())

    def usage(self) -> Usage:
        """What was counted so far. Of a prompt with several choices the first one tells what was cached."""
        num_prompt = sum(len(token_ids) for token_ids, _ in self.prompts)
        num_output = sum(output.num_output_tokens for output in self.latest if output)
        cached = PromptTokensDetails(sum(output.num_cached_tokens for output in self.latest[:: self.n] if output))
        return Usage(num_prompt, num_output, num_prompt + num_output, cached)

    def _generate(self) -> AsyncGenerator[OutputBatch, None]:
        return self.serving.engine.generate_many(
            [(token_ids, params.for_choice(j)) for token_ids, params in self.prompts for j in range(self.n)],
            request_id=self.id,
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt,
        )

    def response(self, kind: str, choices: list[Any], usage: UsageField) -> Response:
        return Response(
            id=self.id,
            object=kind,
            created=self.created,
            model=self.serving.model.id,
            system_fingerprint=self.serving.system_fingerprint,
            choices=choices,
            usage=usage,
        )


class ChunkWriter:
    """The events of one generation. What all of its chunks begin and end with is encoded once."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.options = generation.body.stream_options or StreamOptions()
        empty = generation.response(generation.renderer.chunk_object, [], UNSET)
        self.head, _, self.tail = event(msgspec.json.encode(empty)).rpartition(b"[]")

    def events(self, batch: OutputBatch) -> bytes:
        chunks = []
        usage: UsageField = None if self.options.include_usage else UNSET
        for index, output in batch:
            self.generation.latest[index] = output
            if self.options.continuous_usage_stats:
                usage = self.generation.usage()
            for choice in self.generation.renderer.chunks(index, output):
                chunks.append(self._chunk([choice], usage))
        return b"".join(chunks)

    def end(self) -> bytes:
        return (self._chunk([], self.generation.usage()) if self.options.include_usage else b"") + DONE

    def error(self, error: Exception) -> bytes:
        return event(error_body(error))

    def _chunk(self, choices: list[Any], usage: UsageField) -> bytes:
        begun = self.head + msgspec.json.encode(choices)
        if usage is not UNSET:
            begun += b',"usage":' + msgspec.json.encode(usage)
        return begun + self.tail


def _ignored_header(names: list[str]) -> dict[str, str]:
    """At most 20 names, escaped for a header line."""
    printable = [name[:64].encode("ascii", "backslashreplace").decode() for name in names[:20]]
    cleaned = ["".join(letter if letter.isprintable() else "?" for letter in name) for name in printable]
    return {"x-octavo-ignored-fields": ", ".join(cleaned)} if cleaned else {}
