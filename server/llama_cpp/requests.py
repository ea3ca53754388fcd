"""What llama.cpp's /completion and /infill take, as prompts and `SamplingParams`."""

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from configs.errors import InvalidRequest, shown
from configs.sampling import SamplingParams, StructuredOutput
from server.bodies import ModelRequest, Unsupported
from server.field_names import naming
from server.generation import Generation, Prompt
from server.sampling import (
    NEUTRAL_PENALTIES,
    NumLogprobs,
    Penalty,
    TokenId,
    check_stop,
    fitted,
    is_penalised,
    sampling_params,
)
from server.serving import Serving
from server.structured import STRICT, JsonSchema, json_schema

Piece = str | TokenId
Pieces = list[Piece]


@STRICT
class PromptObject(TypedDict):
    prompt_string: str
    multimodal_data: NotRequired[Annotated[list[Any], Field(max_length=0)] | None]
    """Images and audio are not supported."""


NativePrompt = Annotated[
    str | PromptObject | Annotated[list[Piece | Pieces | PromptObject], Field(min_length=1)],
    Field(union_mode="left_to_right"),
]
"""A text, token ids, both mixed, an object with `prompt_string`, or a list of these."""
Bias = float | bool
Biases = dict[str, Bias] | list[tuple[Piece, Bias]]
NumPredict = Annotated[int, Field(ge=-2, lt=2**63)]


class NativeRequest(ModelRequest):
    """What requests leave out comes from the checkpoint's generation config, not from llama.cpp's own defaults.

    Samplers that there are not here are passed over and named, as all unknown fields.
    """

    n_predict: NumPredict | None = None
    """Most tokens to generate; -1 and -2 are as many as the context holds, 0 computes the prompt alone."""
    max_tokens: NumPredict | None = None
    """The same as n_predict."""
    n_cmpl: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """Answers of each prompt."""
    temperature: float | None = None
    """0 and less are greedy."""
    top_k: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """Only this many likeliest tokens; 0 and -1: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only the likeliest tokens that have this probability together."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Only tokens with at least this share of the likeliest one's probability."""
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    """Divides the positive logits of tokens of prompt and output, and multiplies the negative ones."""
    repeat_last_n: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Penalties look at all tokens, which is -1, or at none, which is 0; other values are named as passed over."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """-1 stands for none."""
    stop: str | tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    logit_bias: Biases | None = None
    """By token id, or by a text whose tokens all get it; false is never."""
    grammar: str | None = None
    json_schema: JsonSchema | None = None
    n_probs: NumLogprobs | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones."""
    stream: bool | None = None
    return_tokens: bool | None = None
    """Add the ids of the answer's tokens; streams always have them."""
    response_fields: Annotated[list[str], Field(max_length=100)] | None = None
    """Only these fields; `timings/prompt_n` is a field of a field, under that name."""

    lora: Annotated[Any, Unsupported(([],))] = None
    multimodal_data: Annotated[Any, Unsupported(([],))] = None
    post_sampling_probs: Annotated[Any, Unsupported((False,))] = None
    cache_prompt: Any = None
    """A hint about the cache, as the five below: no prompt is cut, so none of it has to be kept."""
    id_slot: Any = None
    n_cache_reuse: Any = None
    n_discard: Any = None
    n_keep: Any = None
    sse_ping_interval: Any = None


class NativeCompletionRequest(NativeRequest):
    prompt: NativePrompt


@STRICT
class InfillContext(TypedDict):
    text: str
    filename: NotRequired[str]


class InfillRequest(NativeRequest):
    input_prefix: str
    input_suffix: str
    input_extra: list[InfillContext] | None = None
    """Other files, before the prefix."""
    prompt: str | None = None
    """How the middle begins."""


_SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
"""Fields that mean the same in `SamplingParams`."""
_RANDOM_SEEDS = (-1, 2**32 - 1)
_NEVER, _MOST_BIAS = -100.0, 100.0
_MAX_DIGITS = 20
"""Most digits of a token id; Python converts no more than some thousands."""
_FILE_SEPARATOR, _REPOSITORY = "<|file_sep|>", "<|repo_name|>"


async def native_generation(serving: Serving, body: NativeRequest) -> Generation:
    """Raises `InvalidRequest` naming the field."""
    names = {
        "max_tokens": "n_predict",
        "repetition_penalty": "repeat_penalty",
        "logprobs": "n_probs",
        "n": "n_cmpl",
        "suffix": "input_suffix",
        "structured": "json_schema" if body.json_schema is not None else "grammar",
    }
    with naming(names):
        params = await _params(serving, body)
        items = _prompts(body.prompt) if isinstance(body, NativeCompletionRequest) else []
        serving.check_number_of_choices(max(1, len(items)), params.n)
        if isinstance(body, InfillRequest):
            prompts = [await _infill(serving, body)]
        else:
            prompts = [await _token_ids(serving, item) for item in items]
        checked = []
        for token_ids in prompts:
            fits = fitted(params, serving.engine.info.max_model_len - len(token_ids))
            serving.engine.validate(token_ids, fits)
            checked.append(Prompt(token_ids, fits))
    return Generation(serving, checked, id_prefix="native-", field_names=names)


async def _params(serving: Serving, body: NativeRequest) -> SamplingParams:
    """What the request asks for, over the checkpoint's own."""
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.temperature is not None:
        given["temperature"] = max(0.0, body.temperature)
    if body.repeat_penalty is not None:
        given["repetition_penalty"] = body.repeat_penalty
    if body.repeat_last_n == 0:
        given |= NEUTRAL_PENALTIES
    if body.seed is not None and body.seed not in _RANDOM_SEEDS:
        given["seed"] = body.seed
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    check_stop(stop, serving.config)
    given |= {
        "max_tokens": None if limit in (None, -1, -2) else limit,
        "n": 1 if body.n_cmpl is None else body.n_cmpl,
        "stop": tuple(filter(None, stop)),
        "logprobs": body.n_probs or None,
        "logit_bias": await _biases(serving, body),
        "structured": _structured(body),
    }
    return sampling_params(given, serving.engine.default_sampling)


def settings(params: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """`params` in llama.cpp's words."""
    return {
        "n_ctx": max_model_len,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": _RANDOM_SEEDS[1] if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop,
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
    }


def passed_over(body: NativeRequest, params: SamplingParams) -> list[str]:
    """Known fields that are not served as they stand."""
    return ["repeat_last_n"] if is_penalised(params) and body.repeat_last_n not in (None, -1) else []


def _structured(body: NativeRequest) -> StructuredOutput | None:
    if body.json_schema is None:
        return StructuredOutput("grammar", body.grammar) if body.grammar else None
    if body.grammar:
        raise InvalidRequest("grammar and json_schema exclude each other", param="grammar")
    return json_schema(body.json_schema)


async def _biases(serving: Serving, body: NativeRequest) -> dict[int, float] | None:
    given = body.logit_bias or {}
    found: dict[int, float] = {}
    for piece, bias in given.items() if isinstance(given, dict) else given:
        if isinstance(piece, int) or piece.isdecimal():
            if len(str(piece)) > _MAX_DIGITS:
                raise InvalidRequest(f"logit_bias must be token ids; got {shown(piece)}", param="logit_bias")
            token_ids = [int(piece)]
        else:
            token_ids = await serving.engine.encode(piece, add_special_tokens=False)
        value = (0.0 if bias else _NEVER) if isinstance(bias, bool) else max(_NEVER, min(_MOST_BIAS, bias))
        found |= dict.fromkeys(token_ids, value)
    return found or None


def _prompts(given: Any) -> list[Pieces]:
    """The pieces of each prompt: a list with token ids and no lists in it is one prompt."""
    if not isinstance(given, list):
        return [_pieces(given)]
    is_one = not any(isinstance(item, list | dict) for item in given) and any(isinstance(item, int) for item in given)
    return [_pieces(given)] if is_one else [_pieces(item) for item in given]


def _pieces(given: Any) -> Pieces:
    given = given["prompt_string"] if isinstance(given, dict) else given
    return given if isinstance(given, list) else [given]


async def _token_ids(serving: Serving, pieces: Pieces) -> list[int]:
    """What the tokenizer puts before every text comes before one at the beginning."""
    engine = serving.engine
    token_ids: list[int] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            token_ids.append(piece)
        else:
            token_ids += await engine.encode(piece, add_special_tokens=index == 0, must_fit=True)
    if not token_ids and engine.tokenizer.bos_token_id is not None:
        return [engine.tokenizer.bos_token_id]
    return token_ids


async def _infill(serving: Serving, body: InfillRequest) -> list[int]:
    """Other files stand before the prefix, as in a repository where the model has tokens for that."""
    engine = serving.engine
    token_ids = await engine.encode_infill(body.input_prefix, body.input_suffix, must_fit=True)
    if body.prompt:
        token_ids = token_ids + await engine.encode(body.prompt, add_special_tokens=False, must_fit=True)
    if not body.input_extra:
        return token_ids
    if engine.tokenizer.special_id(_FILE_SEPARATOR) is None:
        text = "".join(f"{extra['text']}\n" for extra in body.input_extra)
    else:
        named = [(extra.get("filename", "tmp"), extra["text"]) for extra in body.input_extra]
        files = "".join(f"{_FILE_SEPARATOR}{name}\n{text}\n" for name, text in named)
        text = f"{_REPOSITORY}myproject\n{files}{_FILE_SEPARATOR}filename\n"
    begins = token_ids[:1] == [engine.tokenizer.bos_token_id]
    others = await engine.encode(text, add_special_tokens=False, must_fit=True)
    return [*token_ids[:begins], *others, *token_ids[begins:]]
