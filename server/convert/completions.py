"""From the fields of /v1/completions to prompts and `SamplingParams`."""

import asyncio

import msgspec

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from server.convert.sampling import given_sampling, sampling_params, truncated
from server.convert.structured import field_names
from server.field_names import naming
from server.generation import Prompt
from server.protocol.completions import CompletionRequest
from server.serving import Serving

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route alone."""


async def completion_prompts(serving: Serving, body: CompletionRequest) -> list[Prompt]:
    """One per prompt, in order, checked. Raises `InvalidRequest`."""
    params = completion_params(serving, body)
    items = texts_or_ids(body.prompt, "prompt")
    serving.check_number_of_choices(len(items), params.n)
    prompts = []
    for item in items:
        prompts.append(await _prompt(serving, body, item, params))
        await asyncio.sleep(0)  # others get their turn between the texts of a long list
    return prompts


def completion_params(serving: Serving, body: CompletionRequest) -> SamplingParams:
    """max_tokens is None when the request leaves it out; `n` counts what is generated for `best_of`."""
    given = given_sampling(body, serving.config)
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


def texts_or_ids(given: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
    """One per prompt. Raises `InvalidRequest` naming the field."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"{field} is an empty list", param=field)
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise InvalidRequest(f"{field} mixes texts, token ids and lists", param=field)
    return [given] if kinds == {int} else given  # type: ignore[list-item, return-value]


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
    with naming(field_names(body)):
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
