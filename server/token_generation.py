"""POST /inference/v1/generate: token ids in, token ids out."""

from itertools import zip_longest
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter
from pydantic import ConfigDict
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, RequestOutput
from server.bodies import BodyRoute, ParsedRequest, Unsupported
from server.documented import streamed
from server.errors import error_statuses
from server.generation import Generation, GenerationOptions, Prompt, naming
from server.logprobs import LOWEST, ChatLogprobs, chat_logprobs, spelling
from server.openai.base import Choice, OpenAIWriter, Output, PromptFields, StreamedRequest, Usage, finished
from server.sampling import NumLogprobs, SamplingFields, TokenId, beam_length_penalty, given_fields, sampling_params
from server.serving import Serving, ServingOf
from server.structured import structured_outputs

router = APIRouter(route_class=BodyRoute, responses=error_statuses())


class TokenSampling(SamplingFields):
    """Without max_tokens, as many tokens as the context holds."""

    model_config = ConfigDict(extra="forbid")

    logprobs: NumLogprobs | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    detokenize: bool | None = None
    """False where no text is asked for; stop strings need it."""


class TokenGenerationRequest(StreamedRequest):
    token_ids: list[TokenId]
    sampling_params: TokenSampling
    output_mode: Literal["tokens", "text"] | None = None
    """text adds the text, and the texts of tokens to log-probabilities."""
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


class TokenChoice(Choice):
    """The same for whole answers and chunks."""

    text: NotRequired[str]
    """In mode text alone."""
    logprobs: TokenLogprobList | ChatLogprobs | None


class TokenChunk(PromptFields):
    request_id: str
    output_mode: Literal["tokens", "text"]
    choices: list[TokenChoice]
    usage: NotRequired[Usage]


class TokenGeneration(TokenChunk):
    model: str
    created: int
    """Unix seconds."""


@router.post("/inference/v1/generate", response_model=TokenGeneration, responses=streamed(TokenChunk))
async def generate(body: TokenGenerationRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Continue a prompt: token ids in, token ids out."""
    generation = await request.prepare(lambda: token_generation(serving, body))
    return await TokenWriter(generation, body).respond(request)


async def token_generation(serving: Serving, body: TokenGenerationRequest) -> Generation:
    """Raises `InvalidRequest`."""
    body.check_stream_options()
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
    penalty = beam_length_penalty(fields, body.stream)
    options = GenerationOptions(field_names=names, beam_length_penalty=penalty, **body.scheduling)
    prompts = [Prompt(body.token_ids, params)]
    return Generation(serving, prompts, options, id_prefix="" if body.request_id else "generate-")


class TokenWriter(OpenAIWriter[TokenGenerationRequest]):
    has_null_usage = False

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        generation = self.generation
        head = {"request_id": generation.id, "output_mode": self.body.output_mode or "tokens"}
        return head if is_chunk else {**head, "model": generation.serving.model.id, "created": generation.created}

    def choices(self, outputs: list[CompletionOutput]) -> list[TokenChoice]:
        return [self._choice(output.index, output) for output in outputs]

    def chunks(self, index: int, output: RequestOutput) -> list[TokenChoice]:
        return [self._choice(index, output)]

    def _choice(self, index: int, output: Output) -> TokenChoice:
        choice: TokenChoice = {
            "index": index,
            "token_ids": output.token_ids,
            "finish_reason": None,
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
        }
        if self.body.output_mode == "text":
            choice["text"] = output.text
        return finished(choice, output, output.finish_reason)

    def _logprobs(self, positions: list[TokenLogprobs]) -> TokenLogprobList | ChatLogprobs:
        """Behind the likeliest come those of `logprob_token_ids`, whose ranks are unknown."""
        if self.body.output_mode == "text":
            return chat_logprobs(spelling(self.tokenizer, False), self.tokenizer, positions)
        ranks = range(1, (self.body.sampling_params.logprobs or 0) + 1)
        content: list[SampledToken] = []
        for one in positions:
            top: list[RankedToken] = [
                {"token_id": token_id, "logprob": max(LOWEST, logprob), "rank": rank}
                for (token_id, logprob), rank in zip_longest(one.top, ranks[: len(one.top)])
            ]
            logprob = max(LOWEST, one.logprob)
            content.append({"token_id": one.token_id, "logprob": logprob, "rank": one.rank, "top_logprobs": top})
        return {"content": content}
