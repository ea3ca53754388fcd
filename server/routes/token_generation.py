"""POST /inference/v1/generate."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from configs.settings import ServerConfig
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.choices import stream_options, usage_of
from server.convert.token_generation import token_generation
from server.disconnect import until_disconnect
from server.errors import openai_error
from server.generation import Generation
from server.logprobs import LOWEST, chat_logprobs, prompt_logprobs, spelling
from server.parsing import BodyParser, ignored_header
from server.protocol.token_generation import (
    RankedToken,
    SampledToken,
    TextChoice,
    TextChunk,
    TextGeneration,
    TokenChoice,
    TokenChunk,
    TokenGeneration,
    TokenGenerationRequest,
    TokenLogprobList,
)
from server.serving import serving_of
from server.sse import DONE, EventStream, event


class TokenGenerationRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(TokenGenerationRequest, config)

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body, headers = parsed.body, ignored_header(parsed.ignored_fields)
        serving.check_model(body.model)
        generation = await serving.preparation.prepare(request, lambda: token_generation(serving, body))
        writer = TokenWriter(generation, body)
        if body.stream:
            interval = serving.config.sse_keep_alive_interval
            return EventStream(generation.run(), writer, headers, keep_alive=interval)
        outputs = await until_disconnect(request.receive, generation.whole())
        content = msgspec.json.encode(writer.whole(outputs))
        return Response(content, headers=headers, media_type="application/json")


class TokenWriter:
    """Answers of one generation: whole, or event by event."""

    def __init__(self, generation: Generation, body: TokenGenerationRequest) -> None:
        self.generation = generation
        self.body = body
        self.options = stream_options(body.stream_options, generation.serving.config)
        self.tokenizer = generation.serving.engine.tokenizer
        self.spell = spelling(self.tokenizer, False)
        self.with_text = body.output_mode == "text"
        self.is_first = True

    def whole(self, outputs: list[CompletionOutput]) -> TokenGeneration | TextGeneration:
        generation = self.generation
        fields: dict[str, Any] = {
            "request_id": generation.id,
            "model": generation.serving.model.id,
            "created": generation.created,
            "choices": [self._choice(output.index, output) for output in outputs],
            "usage": usage_of(generation),
            **self._about_prompt(outputs[0]),
        }
        return TextGeneration(**fields) if self.with_text else TokenGeneration(**fields)

    def events(self, batch: OutputBatch) -> bytes:
        chunks = []
        for index, output in batch:
            self.generation.latest[index] = output
            about_prompt = self._about_prompt(output) if self.is_first else {}
            self.is_first = False
            with_usage = bool(self.options.continuous_usage_stats)
            chunks.append(self._chunk([self._choice(index, output)], with_usage, about_prompt))
        return b"".join(chunks)

    def end(self) -> bytes:
        return (self._chunk([], True, {}) if self.options.include_usage else b"") + DONE

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))

    def _chunk(self, choices: list[Any], with_usage: bool, about_prompt: dict[str, Any]) -> bytes:
        kind = TextChunk if self.with_text else TokenChunk
        usage = usage_of(self.generation) if with_usage else UNSET
        chunk = kind(request_id=self.generation.id, choices=choices, usage=usage, **about_prompt)
        return event(msgspec.json.encode(chunk))

    def _about_prompt(self, output: CompletionOutput | RequestOutput) -> dict[str, Any]:
        """What the request asks for; `output` is the first of the first choice."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.body.token_ids
        if (count := self.body.sampling_params.prompt_logprobs) is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.tokenizer, output.prompt_logprobs or [], count)
        return fields

    def _choice(self, index: int, output: CompletionOutput | RequestOutput) -> TokenChoice | TextChoice:
        fields: dict[str, Any] = {
            "index": index,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": UNSET if output.stop_reason is None else output.stop_reason,
        }
        positions = output.logprobs
        if self.with_text:
            logprobs = None if positions is None else chat_logprobs(self.spell, self.tokenizer, positions)
            return TextChoice(text=output.text, logprobs=logprobs, **fields)
        return TokenChoice(logprobs=None if positions is None else self._token_logprobs(positions), **fields)

    def _token_logprobs(self, positions: Sequence[TokenLogprobs]) -> TokenLogprobList:
        """Behind the likeliest come those of `logprob_token_ids`, whose ranks are unknown."""
        count = self.body.sampling_params.logprobs or 0
        ranks = [*range(1, count + 1)]
        content = []
        for position in positions:
            top = [
                RankedToken(token_id, max(LOWEST, logprob), rank)
                for (token_id, logprob), rank in zip_longest(position.top, ranks[: len(position.top)])
            ]
            content.append(SampledToken(position.token_id, max(LOWEST, position.logprob), position.rank, top))
        return TokenLogprobList(content)
