"""POST /inference/v1/generate: token ids in, token ids out."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.bodies import BodyRoute, ParsedRequest, Unsupported
from server.documented import streamed
from server.errors import error_statuses, openai_error
from server.generation import Generation, GenerationOptions, Prompt, naming
from server.logprobs import LOWEST, ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs, spelling
from server.openai.base import (
    ScheduledRequest,
    StopReason,
    StreamOptions,
    Usage,
    check_stream_options,
    usage_of,
    with_usage,
)
from server.sampling import NumLogprobs, SamplingFields, TokenId, beam_length_penalty, given_fields, sampling_params
from server.serving import Serving, ServingOf
from server.sse import DONE, EventStream, event, until_disconnect
from server.structured import structured_outputs

router = APIRouter(route_class=BodyRoute, responses=error_statuses())


class TokenSampling(SamplingFields):
    """Without max_tokens, as many tokens as the context holds."""

    model_config = ConfigDict(extra="forbid")

    logprobs: NumLogprobs | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    detokenize: bool | None = None
    """False where no text is asked for; stop strings need it."""


class TokenGenerationRequest(ScheduledRequest):
    token_ids: list[TokenId]
    sampling_params: TokenSampling
    output_mode: Literal["tokens", "text"] | None = None
    """text adds the text, and the texts of tokens to log-probabilities."""
    return_token_ids: bool | None = None
    """Add the prompt's ids to the answer."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    content_parts: Annotated[Any, Unsupported(([],))] = None
    ec_transfer_params: Annotated[Any, Unsupported()] = None
    features: Annotated[Any, Unsupported()] = None
    kv_transfer_params: Annotated[Any, Unsupported()] = None
    reasoning_ended: Annotated[Any, Unsupported()] = None
    reasoning_parser_kwargs: Annotated[Any, Unsupported()] = None
    token_offsets: Any = None
    """Changes nothing."""


class RankedToken(TypedDict):
    token_id: int
    logprob: float
    rank: int | None
    """1 for the likeliest."""


class SampledToken(RankedToken):
    top_logprobs: list[RankedToken]


class TokenLogprobList(TypedDict):
    """One entry per generated token."""

    content: list[SampledToken]


class TokenChoice(TypedDict):
    """The same for whole answers and chunks."""

    index: int
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: NotRequired[StopReason]
    text: NotRequired[str]
    """In mode text alone."""
    logprobs: TokenLogprobList | ChatLogprobs | None


class TokenChunk(TypedDict):
    request_id: str
    output_mode: Literal["tokens", "text"]
    choices: list[TokenChoice]
    prompt_token_ids: NotRequired[list[int]]
    """This and the next, if asked for; of a stream, in the first chunk."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    usage: NotRequired[Usage]


class TokenGeneration(TokenChunk):
    model: str
    created: int
    """Unix seconds."""


@router.post("/inference/v1/generate", response_model=TokenGeneration, responses=streamed(TokenChunk))
async def generate(body: TokenGenerationRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Continue a prompt: token ids in, token ids out."""
    generation = await request.prepare(lambda: token_generation(serving, body))
    writer = TokenWriter(generation, body)
    if body.stream:
        return EventStream(generation.run(), writer, keep_alive=serving.config.sse_keep_alive_interval)
    outputs = await until_disconnect(request.receive, generation.whole())
    return Response(writer.whole(outputs), media_type="application/json")


async def token_generation(serving: Serving, body: TokenGenerationRequest) -> Generation:
    """Raises `InvalidRequest`."""
    check_stream_options(body.stream_options, body.stream)
    fields = body.sampling_params
    if fields.detokenize is False and (fields.stop or body.output_mode == "text"):
        raise InvalidRequest("stop and output_mode text need detokenize", param="sampling_params")
    given = given_fields(fields, serving.config)
    given["logprobs"] = fields.logprobs
    given["max_tokens"] = fields.max_tokens
    given["structured"] = structured_outputs(fields.structured_outputs) if fields.structured_outputs else None
    names = {"prompt": "token_ids", "structured": "structured_outputs"}
    with naming(names):
        params = sampling_params(given, serving.engine.default_sampling)
        serving.check_number_of_choices(1, params.n)
        serving.engine.validate(body.token_ids, params)
    options = GenerationOptions(
        request_id=body.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=body.timeout_s,
        field_names=names,
        beam_length_penalty=beam_length_penalty(fields, body.stream),
    )
    prompts = [Prompt(body.token_ids, params)]
    return Generation(serving, prompts, options, id_prefix="" if body.request_id else "generate-")


class TokenWriter:
    """Writes one answer: whole, or event by event."""

    def __init__(self, generation: Generation, body: TokenGenerationRequest) -> None:
        self.generation = generation
        self.body = body
        self.tokenizer = generation.serving.engine.tokenizer
        self.spell = spelling(self.tokenizer, False)
        self._usage_in_last, self._usage_in_all = with_usage(body.stream_options, generation.serving.config)
        self._is_first = True

    def whole(self, outputs: list[CompletionOutput]) -> bytes:
        generation = self.generation
        answer: TokenGeneration = {
            **self._chunk([self._choice(output.index, output) for output in outputs], outputs[0]),
            "model": generation.serving.model.id,
            "created": generation.created,
            "usage": usage_of(generation),
        }
        return msgspec.json.encode(answer)

    def events(self, batch: OutputBatch) -> bytes:
        chunks = []
        for index, output in batch:
            self.generation.latest[index] = output
            chunk = self._chunk([self._choice(index, output)], output if self._is_first else None)
            self._is_first = False
            if self._usage_in_all:
                chunk["usage"] = usage_of(self.generation)
            chunks.append(event(msgspec.json.encode(chunk)))
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self._usage_in_last:
            return DONE
        return event(msgspec.json.encode({**self._chunk([], None), "usage": usage_of(self.generation)})) + DONE

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))

    def _chunk(self, choices: list[TokenChoice], first: CompletionOutput | RequestOutput | None) -> TokenChunk:
        """`first` is the first output of the first choice: beside it stands what is asked about the prompt."""
        chunk: TokenChunk = {
            "request_id": self.generation.id,
            "output_mode": self.body.output_mode or "tokens",
            "choices": choices,
        }
        if first is not None and self.body.return_token_ids:
            chunk["prompt_token_ids"] = self.body.token_ids
        if first is not None and (count := self.body.sampling_params.prompt_logprobs) is not None:
            chunk["prompt_logprobs"] = prompt_logprobs(self.tokenizer, first.prompt_logprobs or [], count)
        return chunk

    def _choice(self, index: int, output: CompletionOutput | RequestOutput) -> TokenChoice:
        choice: TokenChoice = {
            "index": index,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
        }
        if output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if self.body.output_mode == "text":
            choice["text"] = output.text
        return choice

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> TokenLogprobList | ChatLogprobs:
        """Behind the likeliest come those of `logprob_token_ids`, whose ranks are unknown."""
        if self.body.output_mode == "text":
            return chat_logprobs(self.spell, self.tokenizer, positions)
        ranks = [*range(1, (self.body.sampling_params.logprobs or 0) + 1)]
        content: list[SampledToken] = []
        for one in positions:
            top: list[RankedToken] = [
                {"token_id": token_id, "logprob": max(LOWEST, logprob), "rank": rank}
                for (token_id, logprob), rank in zip_longest(one.top, ranks[: len(one.top)])
            ]
            logprob = max(LOWEST, one.logprob)
            content.append({"token_id": one.token_id, "logprob": logprob, "rank": one.rank, "top_logprobs": top})
        return {"content": content}
