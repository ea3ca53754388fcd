"""POST /v1/completions."""

import asyncio
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from engine.outputs import CompletionOutput, RequestOutput
from server.bodies import BodyRoute, ParsedRequest
from server.documented import streamed
from server.errors import error_statuses
from server.generation import Generation, GenerationOptions, Prompt, naming
from server.logprobs import CompletionLogprobs, CompletionTokens, PromptLogprobs, joined, prompt_logprobs
from server.openai.base import AnswerHead, GenerationRequest, OpenAIWriter, StopReason
from server.sampling import NumLogprobs, TokenId, beam_length_penalty, sampling_params, truncated
from server.serving import Serving, ServingOf

router = APIRouter(route_class=BodyRoute, responses=error_statuses())

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


class CompletionChoice(TypedDict):
    """The same for whole answers and chunks."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[StopReason]
    prompt_logprobs: NotRequired[PromptLogprobs]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(AnswerHead):
    """A whole answer, or one chunk of it."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


@router.post("/v1/completions", response_model=Completion, responses=streamed(Completion))
async def completions(body: CompletionRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Continue prompts."""
    prompts = await request.prepare(lambda: completion_prompts(serving, body))
    options = GenerationOptions(
        priority=body.priority,
        cache_salt=body.cache_salt,
        field_names=body.field_names,
        request_id=body.request_id,
        timeout=body.timeout_s,
        beam_length_penalty=beam_length_penalty(body, body.stream),
    )
    generation = Generation(serving, prompts, options, id_prefix="cmpl-")
    return await CompletionWriter(generation, body).respond(request)


async def completion_prompts(serving: Serving, body: CompletionRequest) -> list[Prompt]:
    """One per prompt, in order, checked. Raises `InvalidRequest`."""
    params = _params(serving, body)
    items = prompt_list(body.prompt)
    serving.check_number_of_choices(len(items), params.n)
    prompts = []
    for item in items:
        prompts.append(await _prompt(serving, body, item, params))
        await asyncio.sleep(0)  # others get their turn between the texts of a long list
    return prompts


def prompt_list(given: Any) -> list[str | list[int]]:
    """One per prompt."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _params(serving: Serving, body: CompletionRequest) -> SamplingParams:
    """max_tokens is None when the request leaves it out; `n` counts what is generated for `best_of`."""
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
    with naming(body.field_names):
        engine.validate(token_ids, params)
    if not body.echo:
        return Prompt(token_ids, params)
    as_given = isinstance(prompt, str) and body.truncate_prompt_tokens is None
    return Prompt(token_ids, params, str(prompt) if as_given else await engine.decode(token_ids))


async def _encode(serving: Serving, body: CompletionRequest, text: str) -> list[int]:
    """An empty text begins a new document where the tokenizer has a token for that."""
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
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        super().__init__(generation, body)
        self.tokens: dict[int, CompletionTokens] = {}
        """How the tokens of each choice are written, as far as they were sent."""
        self.begins_with_prompt = bool(body.echo or body.return_token_ids or body.prompt_logprobs is not None)
        self.begun: set[int] = set()
        """Choices whose prompt was sent."""
        self.is_plain = not self.begins_with_prompt and body.logprobs is None
        """Chunks hold text alone."""

    def choices(self, outputs: list[CompletionOutput]) -> list[CompletionChoice]:
        kept = self.body.n or 1
        if kept < self.generation.n:
            outputs = best_of(outputs, self.generation.n, kept)
        choices = []
        for index, output in enumerate(outputs):
            choice = self._choice(index, output)
            choice["finish_reason"] = output.finish_reason
            if output.stop_reason is not None:
                choice["stop_reason"] = output.stop_reason
            choices.append(choice)
        return choices

    def chunks(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        """Text and reason travel apart, as from OpenAI: the finish chunk is empty."""
        choices: list[CompletionChoice] = []
        if self.is_plain:
            if output.text:
                choices.append({"index": index, "text": output.text, "logprobs": None, "finish_reason": None})
        elif output.text or output.token_ids or index not in self.begun:
            choices.append(self._choice(index, output))
        if output.finish_reason is not None:
            last: CompletionChoice = {
                "index": index,
                "text": "",
                "logprobs": None,
                "finish_reason": output.finish_reason,
            }
            if output.stop_reason is not None:
                last["stop_reason"] = output.stop_reason
            choices.append(last)
        return choices

    def _choice(self, index: int, output: CompletionOutput | RequestOutput) -> CompletionChoice:
        """What came of a choice; the first time with what is said of the prompt."""
        begins = index not in self.begun
        self.begun.add(index)
        prompt = self.generation.prompts[index // (self.body.n or 1)]
        choice: CompletionChoice = {
            "index": index,
            "text": (prompt.text or "") + output.text if begins else output.text,
            "logprobs": self._logprobs(index, output, prompt.token_ids if begins and self.body.echo else None),
            "finish_reason": None,
        }
        if begins and (count := self.body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, output.prompt_logprobs or [], count)
        if self.body.return_token_ids:
            choice["token_ids"] = output.token_ids
            if begins:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice

    def _logprobs(
        self, index: int, output: CompletionOutput | RequestOutput, echoed: list[int] | None
    ) -> CompletionLogprobs | None:
        """Those of the prompt `echoed` come first."""
        count = self.body.logprobs
        if count is None:
            return None
        tokens = self.tokens.get(index)
        if tokens is None:
            tokens = self.tokens[index] = CompletionTokens(self.tokenizer, self.body.return_tokens_as_token_ids)
        if echoed is None:
            return tokens.logprobs(output.logprobs or [])
        of_prompt = tokens.echoed(echoed, output.prompt_logprobs or [], count)
        return joined(of_prompt, tokens.logprobs(output.logprobs or []))


def best_of(outputs: list[CompletionOutput], generated: int, kept: int) -> list[CompletionOutput]:
    """Of each prompt's `generated` choices the `kept` with the highest mean log-probability per token."""
    best: list[CompletionOutput] = []
    for start in range(0, len(outputs), generated):
        best += sorted(outputs[start : start + generated], key=_mean_logprob, reverse=True)[:kept]
    return best


def _mean_logprob(output: CompletionOutput) -> float:
    logprobs = output.logprobs or []
    return sum(position.logprob for position in logprobs) / max(1, len(logprobs))
