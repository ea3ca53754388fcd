"""From request fields to `SamplingParams`: what /v1/completions, /v1/chat/completions and others share."""

from typing import Annotated, Any, ClassVar, Literal, NotRequired

import msgspec
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.sampling import (
    MAX_BAD_WORDS,
    MAX_BEAMS,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_PATTERN_SIZE,
    MAX_WORD,
    SamplingParams,
)
from configs.sampling import RepetitionDetection as RepetitionDetectionParams
from configs.settings import ServerConfig
from server.bodies import RequestBody
from server.structured import CLOSED, StructuredOutputs

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Text = Annotated[str, Field(min_length=1)]
TruncateTo = Literal[-1] | Annotated[int, Field(ge=1)]
BadWords = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=MAX_WORD)], ...], Field(max_length=MAX_BAD_WORDS)
]


@CLOSED
class RepetitionDetection(TypedDict):
    """End where the output ends with `min_count` times a pattern of so many tokens."""

    max_pattern_size: NotRequired[Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)]]
    """0: nothing is looked for."""
    min_pattern_size: NotRequired[Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)]]
    min_count: NotRequired[Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)]]


class CommonSampling(RequestBody):
    """How one answer is decoded, in fields of the same names in OpenAI's, vLLM's, llama.cpp's and Ollama's APIs."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """Only this many likeliest tokens; 0 and -1: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only the likeliest tokens that have this probability together."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Only tokens with at least this share of the likeliest one's probability."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that the output has."""
    frequency_penalty: Penalty | None = None
    """The same, times how often it has them."""
    stop: Text | tuple[Text, ...] | None = None
    """Texts before which the answer ends."""


class SamplingFields(CommonSampling):
    """How one answer is decoded. What is left out comes from the checkpoint's generation config, or is OpenAI's."""

    n: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """Independent choices for each prompt."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens of the answer."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """No end of sequence, stop id or stop string before so many."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Divides the positive logits of tokens of prompt and output, and multiplies the negative ones."""
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
            Field(json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
        ]
        | None
    ) = None
    """Added to the logits of these token ids."""
    bad_token_ids: tuple[TokenId, ...] | None = None
    """Never chosen."""
    bad_words: BadWords | None = None
    """Texts that the answer does not contain."""
    allowed_token_ids: tuple[TokenId, ...] | None = None
    """None but these are chosen."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Equal seeds give equal answers to equal requests."""
    stop_token_ids: tuple[TokenId, ...] | None = None
    """Tokens with which it ends."""
    include_stop_str_in_output: bool | None = None
    """Leave the stop string at its end."""
    ignore_eos: bool | None = None
    """Go on behind the end of the sequence."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text (default true)."""
    use_beam_search: bool | None = None
    """Answer with the `n` likeliest sequences instead of drawn ones; cannot be streamed."""
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    """Of beam search: sums of log-probabilities are divided by length to this power (default 1)."""
    prompt_logprobs: NumLogprobs | None = None
    """Log-probabilities of the prompt's tokens, and of this many likeliest ones at each place."""
    logprob_token_ids: tuple[TokenId, ...] | None = None
    """Tokens whose log-probabilities are told besides."""
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None


def _without_fraction(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


AlsoFloat = BeforeValidator(_without_fraction)
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63), AlsoFloat]


class LlamaSampling(CommonSampling):
    """What llama.cpp and Ollama name alike. Clients write all numbers as floats: integers are those without a fraction.

    What requests leave out comes from the checkpoint's generation config, not from defaults of theirs.
    """

    random_seeds: ClassVar[tuple[int, ...]] = (-1,)

    top_k: Annotated[int, Field(ge=-1, lt=2**63), AlsoFloat] | None = None
    """Only this many likeliest tokens; 0 and -1: all."""
    seed: Integer | None = None
    """-1 stands for none."""
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    """Divides the positive logits of tokens of prompt and output, and multiplies the negative ones."""
    repeat_last_n: Integer | None = None
    """Penalties look at all tokens, which is -1, or at none, which is 0; others are served as -1, and named."""

    def given_sampling(self, config: ServerConfig, place: str = "") -> dict[str, Any]:
        """The given fields of `SamplingParams`. Raises `InvalidRequest` with the field's name behind its `place`."""
        given = {
            **{name: getattr(self, name) for name in CommonSampling.model_fields},
            "stop": stop_strings(self.stop, config, f"{place}stop"),
            "repetition_penalty": self.repeat_penalty,
            "seed": None if self.seed in self.random_seeds else self.seed,
            **(_NEUTRAL_PENALTIES if self.repeat_last_n == 0 else {}),
        }
        return {name: value for name, value in given.items() if value is not None}

    def served_otherwise(self, params: SamplingParams) -> list[str]:
        """Names of fields that cannot be served as they stand; `params` are those that the request came to."""
        is_penalised = any(getattr(params, name) != neutral for name, neutral in _NEUTRAL_PENALTIES.items())
        return ["repeat_last_n"] if is_penalised and self.repeat_last_n not in (None, -1) else []


_SAME_NAME = {field.name for field in msgspec.structs.fields(SamplingParams)} & set(SamplingFields.model_fields) - {
    "max_tokens",
    "stop",
    "repetition_detection",
}
"""Fields that mean the same in a request and in `SamplingParams`."""
_NOT_IN_BEAM_SEARCH = _SAME_NAME - {"n", "ignore_eos", "skip_special_tokens", "temperature", "seed"} | {
    *("stop", "best_of", "logprobs", "response_format", "structured_outputs", "repetition_detection"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
}
"""Sampling fields that the search would pass over. A temperature and a seed may be sent: clients do so by habit."""
_NEUTRAL_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
_DEFAULTS = SamplingParams()


def given_fields(fields: SamplingFields, config: ServerConfig) -> dict[str, Any]:
    """The given fields that mean the same in `SamplingParams`. Raises `InvalidRequest`."""
    given = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    if fields.repetition_detection is not None:
        given["repetition_detection"] = RepetitionDetectionParams(**fields.repetition_detection)
    return {**given, "stop": stop_strings(fields.stop, config)}


def sampling_params(given: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """What the request gives, else the checkpoint's `defaults`, else OpenAI's. Raises `InvalidRequest`."""
    return SamplingParams(**{**defaults, **given})


def beam_length_penalty(body: SamplingFields, stream: bool | None) -> float | None:
    """The length penalty; None without beam search. Raises `InvalidRequest` for fields that mean nothing in it."""
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
    for name in sorted(_NOT_IN_BEAM_SEARCH & body.model_fields_set):
        value = getattr(body, name)
        if value and value != getattr(_DEFAULTS, name, None):
            raise InvalidRequest(f"{name} has no meaning in beam search", param=name)
    return 1.0 if body.length_penalty is None else body.length_penalty


def truncated(token_ids: list[int], limit: int | None, room: int, side: str = "left") -> list[int]:
    """At most `limit` token ids, `room` where it is -1; what is more is cut off at the side. None cuts nothing."""
    if limit is None:
        return token_ids
    kept = room if limit == -1 else limit
    return token_ids[-kept:] if side == "left" else token_ids[:kept]


def fitted(params: SamplingParams, room: int) -> SamplingParams:
    """Parameters with a max_tokens of at most `room`; without any room it stays, for an error that tells the sizes."""
    if params.max_tokens is None or params.max_tokens <= room or room < 1:
        return params
    return msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def stop_strings(given: str | tuple[str, ...] | None, config: ServerConfig, field: str = "stop") -> tuple[str, ...]:
    """One, several or no stop strings. Raises `InvalidRequest` naming `field` for too many, or too long ones."""
    stop = (given,) if isinstance(given, str) else given or ()
    if len(stop) > config.max_stop_strings:
        message = f"{field} may hold {config.max_stop_strings} strings; got {len(stop)}"
        raise InvalidRequest(message, param=field)
    num_chars = sum(map(len, stop))
    if num_chars > config.max_stop_chars:
        message = f"the strings of {field} may have {config.max_stop_chars} characters together; got {num_chars}"
        raise InvalidRequest(message, param=field)
    return stop
