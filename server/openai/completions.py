"""POST /v1/completions: texts are continued; and POST /inference/v1/generate: token ids in, token ids out."""

import asyncio
from collections import defaultdict
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, RequestOutput
from server.bodies import BodyRoute, ParsedRequest, Unsupported
from server.documented import streamed
from server.errors import error_statuses
from server.generation import Generation, GenerationOptions, Prompt, naming
from server.logprobs import LOWEST, ChatLogprobs, CompletionLogprobs, CompletionTokens, chat_logprobs
from server.openai.base import (
    AnswerHead,
    Choice,
    GenerationRequest,
    OpenAIWriter,
    Output,
    PromptFields,
    StreamedRequest,
    Usage,
    finished,
)
from server.sampling import NumLogprobs, SamplingFields, TokenId, given_fields, sampling_params, truncated
from server.serving import Serving, ServingOf
from server.structured import structured_outputs

router = APIRouter(route_class=BodyRoute, tags=["OpenAI"], responses=error_statuses())

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route alone."""

TextsOrIds = Annotated[
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[list[TokenId]], Field(min_length=1)],
    Field(union_mode="left_to_right"),
]
"""A text, a list of texts, token ids, or a list of lists of them."""


class CompletionRequest(GenerationRequest):
    prompt: TextsOrIds
    logprobs: NumLogprobs | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    suffix: str | None = None
    """What comes behind the answer, for models that can fill in the middle."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Generate this many choices and answer with the `n` of the highest log-probability per token."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's own tokens, such as the beginning of sequence, around text prompts (default true)."""

    @property
    def field_names(self) -> dict[str, str]:
        return super().field_names | ({} if self.best_of is None else {"n": "best_of"})


class CompletionChoice(Choice, PromptFields):
    """The same for whole answers and chunks."""

    text: str
    logprobs: CompletionLogprobs | None


class Completion(AnswerHead):
    """A whole answer, or one chunk of it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


@router.post("/v1/completions", response_model=Completion, responses=streamed(Completion))
async def completions(body: CompletionRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Continue prompts."""
    prompts = await request.prepare(lambda: completion_prompts(serving, body))
    options = GenerationOptions(field_names=body.field_names, **body.options(body))
    generation = Generation(serving, prompts, options, id_prefix="cmpl-")
    return await CompletionWriter(generation, body).respond(request, body.stream_interval)


async def completion_prompts(serving: Serving, body: CompletionRequest) -> list[Prompt]:
    """The prompts, in order, checked. Raises `InvalidRequest`."""
    items, prompts = prompt_list(body.prompt), []
    with naming(body.field_names):
        params = _params(serving, body)
        serving.check_number_of_choices(len(items), params.n)
        for item in items:
            prompts.append(await _prompt(serving, body, item, params))
            await asyncio.sleep(0)  # others get their turn between the texts of a long list
    return prompts


def prompt_list(given: Any) -> list[str | list[int]]:
    """Every single prompt: a text or its token ids."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _params(serving: Serving, body: CompletionRequest) -> SamplingParams:
    """Parameters of all prompts. max_tokens is None when the request leaves it out; `n` counts what `best_of` needs."""
    given = body.given_sampling(serving.config)
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        if body.best_of < n:
            raise InvalidRequest(f"best_of must be at least n, {n}; got {body.best_of}", param="best_of")
        if body.stream:
            raise InvalidRequest("best_of cannot be streamed: the best are known at the end", param="best_of")
        given["n"] = body.best_of
        given["logprobs"] = body.logprobs or 0
    elif body.logprobs is not None:
        given["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return sampling_params(given, serving.engine.default_sampling)


async def _prompt(serving: Serving, body: CompletionRequest, prompt: str | list[int], params: SamplingParams) -> Prompt:
    engine = serving.engine
    limit = engine.info.max_model_len
    if body.suffix and (body.echo or isinstance(prompt, list)):
        raise InvalidRequest("suffix needs a prompt that is a text, and no echo", param="suffix")
    token_ids = prompt if isinstance(prompt, list) else await _encode(serving, body, prompt)
    room = limit - (params.max_tokens or 1)
    token_ids = truncated(token_ids, body.truncate_prompt_tokens, room, body.truncation_side or "left")
    if params.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, max(1, limit - len(token_ids))))
    engine.validate(token_ids, params)
    if not body.echo:
        return Prompt(token_ids, params)
    as_given = isinstance(prompt, str) and body.truncate_prompt_tokens is None
    return Prompt(token_ids, params, str(prompt) if as_given else await engine.decode(token_ids))


async def _encode(serving: Serving, body: CompletionRequest, text: str) -> list[int]:
    """Token ids of a prompt. An empty text begins a new document where the tokenizer has a token for that."""
    engine = serving.engine
    must_fit = body.truncate_prompt_tokens is None
    if body.suffix:
        return await engine.encode_infill(text, body.suffix, must_fit=must_fit)
    special = body.add_special_tokens is not False
    token_ids = await engine.encode(text, add_special_tokens=special, must_fit=must_fit)
    if not token_ids and engine.tokenizer.bos_token_id is not None:
        return [engine.tokenizer.bos_token_id]
    if not token_ids:
        raise InvalidRequest("prompt is empty, and the model has no token to begin with", param="prompt")
    return token_ids


class CompletionWriter(OpenAIWriter[CompletionRequest]):
    whole_object = chunk_object = "text_completion"

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        super().__init__(generation, body)
        new_tokens = partial(CompletionTokens, self.tokenizer, body.return_tokens_as_token_ids)
        self.tokens: defaultdict[int, CompletionTokens] = defaultdict(new_tokens)
        """How the tokens of each choice are written, as far as they were sent."""
        has_ids = body.echo or body.return_token_ids
        self.is_plain = not has_ids and body.prompt_logprobs is None and body.logprobs is None
        """Chunks hold text alone."""

    def beside_choices(self, output: Output) -> PromptFields:
        """Each choice tells of its prompt."""
        return {}

    def choices(self, outputs: list[CompletionOutput]) -> list[CompletionChoice]:
        kept, generated = self.body.n or 1, self.generation.n
        if kept < generated:
            groups = [outputs[start : start + generated] for start in range(0, len(outputs), generated)]
            outputs = [best for group in groups for best in sorted(group, key=_mean_logprob, reverse=True)[:kept]]
        return [self.choice(index, output) for index, output in enumerate(outputs)]

    def choice(self, index: int, output: CompletionOutput) -> CompletionChoice:
        return finished(self._choice(index, output), output, output.finish_reason)

    def chunks(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        """Text and reason travel apart, as from OpenAI: the finish chunk is empty."""
        choices: list[CompletionChoice] = []
        if self.is_plain:
            if output.text:
                choices.append({"index": index, "text": output.text, "logprobs": None, "finish_reason": None})
        elif output.text or output.token_ids or index not in self.begun:
            choices.append(self._choice(index, output))
        if output.finish_reason is not None:
            last: CompletionChoice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            choices.append(finished(last, output, output.finish_reason))
        return choices

    def _choice(self, index: int, output: Output) -> CompletionChoice:
        """The choice with some more tokens or all, the first time also with what is said of the prompt."""
        body, begins = self.body, index not in self.begun
        self.begun.add(index)
        prompt = self.generation.prompts[index // (body.n or 1)]
        positions, unpredicted = output.logprobs or [], None
        if begins and body.echo and body.logprobs is not None:
            of_prompt = output.prompt_logprobs or []
            cut = [TokenLogprobs(one.token_id, one.logprob, one.top[: body.logprobs]) for one in of_prompt]
            positions, unpredicted = cut + positions, prompt.token_ids[0]
        choice: CompletionChoice = {
            "index": index,
            "text": (prompt.text or "") + output.text if begins else output.text,
            "logprobs": None if body.logprobs is None else self.tokens[index].logprobs(positions, unpredicted),
            "finish_reason": None,
        }
        if body.return_token_ids:
            choice["token_ids"] = output.token_ids
        if begins:
            self.add_prompt_fields(choice, prompt, output, body.prompt_logprobs)
        return choice


def _mean_logprob(output: CompletionOutput) -> float:
    logprobs = output.logprobs or []
    return sum(position.logprob for position in logprobs) / max(1, len(logprobs))


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
    """The generation that the request asks for. Raises `InvalidRequest`."""
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
    options = GenerationOptions(field_names=names, **body.options(fields))
    id_prefix = "" if body.request_id else "generate-"
    return Generation(serving, [Prompt(body.token_ids, params)], options, id_prefix=id_prefix)


class TokenWriter(OpenAIWriter[TokenGenerationRequest]):
    has_null_usage = False

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        generation = self.generation
        head = {"request_id": generation.id, "output_mode": self.body.output_mode or "tokens"}
        return head if is_chunk else {**head, "model": generation.serving.model.id, "created": generation.created}

    def chunks(self, index: int, output: RequestOutput) -> list[TokenChoice]:
        return [self.choice(index, output)]

    def choice(self, index: int, output: Output) -> TokenChoice:
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
            return chat_logprobs(self.tokenizer, positions)
        num_ranked = self.body.sampling_params.logprobs or 0
        content: list[SampledToken] = []
        for one in positions:
            top: list[RankedToken] = [
                {"token_id": token_id, "logprob": max(LOWEST, logprob), "rank": rank if rank <= num_ranked else None}
                for rank, (token_id, logprob) in enumerate(one.top, start=1)
            ]
            logprob = max(LOWEST, one.logprob)
            content.append({"token_id": one.token_id, "logprob": logprob, "rank": one.rank, "top_logprobs": top})
        return {"content": content}
