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
from engine.outputs import CompletionOutput, RequestOutput
from server.disconnect import until_disconnect
from server.fan_out import Batch, merge
from server.http_errors import stream_error_body
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
        num_choices = len(prompts) * self.n
        self.num_output_tokens = [0] * num_choices
        self.num_cached_tokens = [0] * num_choices

    async def respond(self, request: Request, ignored_fields: list[str]) -> HttpResponse:
        """The HTTP response; raises what the engine raises before the first token."""
        headers = _ignored_header(ignored_fields)
        if self.body.stream:
            return EventStream(self.events(), stream_error_body, headers)
        whole = await until_disconnect(request.receive, self.whole())
        return HttpResponse(msgspec.json.encode(whole), headers=headers, media_type="application/json")

    async def whole(self) -> Response:
        outputs = [CompletionOutput(index) for index in range(len(self.num_output_tokens))]
        async with aclosing(self._run()) as batches:
            async for batch in batches:
                for index, output in batch:
                    outputs[index].extend(output)
        choices = [self.renderer.whole(output) for output in outputs]
        return self._response(self.renderer.whole_object, choices, self.usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; those that are ready together come as one piece."""
        options = self.body.stream_options or StreamOptions()
        usage: UsageField = None if options.include_usage else UNSET
        async with aclosing(self._run()) as batches:
            async for batch in batches:
                if options.continuous_usage_stats:
                    usage = self.usage()
                choices = [one for index, output in batch for one in self.renderer.chunks(index, output)]
                if choices:
                    yield b"".join(self._chunk([choice], usage) for choice in choices)
        yield (self._chunk([], self.usage()) if options.include_usage else b"") + DONE

    def usage(self) -> Usage:
        """What was counted so far. Of a prompt with several choices the first one tells what was cached."""
        num_prompt = sum(len(token_ids) for token_ids, _ in self.prompts)
        num_output = sum(self.num_output_tokens)
        cached = PromptTokensDetails(sum(self.num_cached_tokens[:: self.n]))
        return Usage(num_prompt, num_output, num_prompt + num_output, cached)

    async def _run(self) -> AsyncGenerator[Batch, None]:
        streams = [
            self.serving.engine.generate(
                token_ids,
                params.for_choice(choice),
                request_id=f"{self.id}-{prompt * self.n + choice}",
                priority=self.body.priority or 0,
                cache_salt=self.body.cache_salt,
            )
            for prompt, (token_ids, params) in enumerate(self.prompts)
            for choice in range(self.n)
        ]
        async with aclosing(merge(streams)) as batches:
            async for batch in batches:
                for index, output in batch:
                    self.num_output_tokens[index] = output.num_output_tokens
                    self.num_cached_tokens[index] = output.num_cached_tokens
                yield batch

    def _chunk(self, choices: list[Any], usage: UsageField) -> bytes:
        return event(msgspec.json.encode(self._response(self.renderer.chunk_object, choices, usage)))

    def _response(self, kind: str, choices: list[Any], usage: UsageField) -> Response:
        return Response(
            id=self.id,
            object=kind,
            created=self.created,
            model=self.serving.model.id,
            system_fingerprint=self.serving.system_fingerprint,
            choices=choices,
            usage=usage,
        )


def _ignored_header(names: list[str]) -> dict[str, str]:
    """At most 20 names, escaped for a header line."""
    printable = [name[:64].encode("ascii", "backslashreplace").decode() for name in names[:20]]
    cleaned = ["".join(letter if letter.isprintable() else "?" for letter in name) for name in printable]
    return {"x-octavo-ignored-fields": ", ".join(cleaned)} if cleaned else {}
