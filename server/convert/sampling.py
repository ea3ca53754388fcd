"""From request fields to `SamplingParams`."""

from typing import Any

import msgspec

from configs.errors import InvalidRequest
from configs.sampling import MAX_LOGPROBS, SamplingParams
from configs.settings import ServerConfig
from server.convert.structured import structured_output
from server.protocol.common import GenerationRequest, SamplingFields, StreamOptions

SAME_NAME = {field.name for field in msgspec.structs.fields(SamplingParams)} & {
    field.name for field in msgspec.structs.fields(SamplingFields)
} - {"max_tokens", "stop"}
"""Fields that mean the same in a request and in `SamplingParams`."""

NEUTRAL_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
MAX_BEAMS = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10
NOT_IN_BEAM_SEARCH = SAME_NAME - {"n", "ignore_eos", "skip_special_tokens", "temperature", "seed"} | {
    *("stop", "best_of", "logprobs", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
}
"""Sampling fields that the search would pass over. A temperature and a seed may be sent: clients do so by habit."""


_DEFAULTS = SamplingParams()


def given_sampling(body: GenerationRequest, config: ServerConfig) -> dict[str, Any]:
    """Fields of `SamplingParams` that the request gives. max_tokens is None when it leaves it out.

    Raises `InvalidRequest`.
    """
    given = given_fields(body, config)
    check_stream_options(body.stream_options, body.stream)
    return {**given, "max_tokens": _max_tokens(body), "structured": structured_output(body)}


def given_fields(fields: SamplingFields, config: ServerConfig) -> dict[str, Any]:
    """Those that mean the same in `SamplingParams`. Raises `InvalidRequest`."""
    given = {name: value for name in SAME_NAME if (value := getattr(fields, name)) is not None}
    stop = (fields.stop,) if isinstance(fields.stop, str) else fields.stop or ()
    check_stop(stop, config)
    return {**given, "stop": stop}


def sampling_params(given: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """What the request gives, over the checkpoint's `defaults`, over OpenAI's. Raises `InvalidRequest`."""
    return SamplingParams(**{**defaults, **given})


def beam_length_penalty(body: SamplingFields, stream: bool | None) -> float | None:
    """None without beam search. Raises `InvalidRequest` for fields that would mean nothing in it."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise InvalidRequest("length_penalty needs use_beam_search", param="length_penalty")
        return None
    if stream:
        raise InvalidRequest("beam search cannot be streamed: the best are known at the end", param="stream")
    if (body.n or 1) > MAX_BEAMS:
        raise InvalidRequest(f"beam search has at most {MAX_BEAMS} beams; got n = {body.n}", param="n")
    if body.max_tokens == 0:
        raise InvalidRequest("beam search needs max_tokens of at least 1", param="max_tokens")
    for name in NOT_IN_BEAM_SEARCH & set(body.__struct_fields__):
        value = getattr(body, name)
        if value and value != getattr(_DEFAULTS, name, None):
            raise InvalidRequest(f"{name} has no meaning in beam search", param=name)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
        message = f"length_penalty must be between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}; got {penalty}"
        raise InvalidRequest(message, param="length_penalty")
    return penalty


def truncated(token_ids: list[int], limit: int | None, room: int, side: str = "left") -> list[int]:
    """`limit` token ids, or `room` when `limit` is -1, what is more cut off at the side. Raises `InvalidRequest`."""
    if limit is None:
        return token_ids
    if limit < 1 and limit != -1:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least 1, or -1 for what the context holds; got {limit}",
            param="truncate_prompt_tokens",
        )
    kept = room if limit == -1 else limit
    return token_ids[-kept:] if side == "left" else token_ids[:kept]


def is_penalised(params: SamplingParams) -> bool:
    """Whether tokens count that were there before."""
    return any(getattr(params, name) != neutral for name, neutral in NEUTRAL_PENALTIES.items())


def fitted(params: SamplingParams, room: int) -> SamplingParams:
    """max_tokens is at most `room`; without any room it stays, for an error that tells the sizes."""
    if params.max_tokens is None or params.max_tokens <= room or room < 1:
        return params
    return msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def check_stop(stop: tuple[str, ...], config: ServerConfig, field: str = "stop") -> None:
    """Raises `InvalidRequest` naming `field` for too many stop strings, or too long ones."""
    if len(stop) > config.max_stop_strings:
        message = f"{field} may hold {config.max_stop_strings} strings; got {len(stop)}"
        raise InvalidRequest(message, param=field)
    num_chars = sum(map(len, stop))
    if num_chars > config.max_stop_chars:
        message = f"the strings of {field} may have {config.max_stop_chars} characters together; got {num_chars}"
        raise InvalidRequest(message, param=field)


def _max_tokens(body: GenerationRequest) -> int | None:
    newer = body.max_completion_tokens is not None
    name, value = ("max_completion_tokens", body.max_completion_tokens) if newer else ("max_tokens", body.max_tokens)
    if value is not None and value < 1 and not (value == 0 and body.answers_with_prompt):
        raise InvalidRequest(f"{name} must be at least 1; got {value}", param=name)
    return value


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    """Raises `InvalidRequest` where they ask for nothing that there is."""
    if options and not stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if options and options.include_obfuscation:
        raise InvalidRequest("include_obfuscation is not supported by this server", param="stream_options")
