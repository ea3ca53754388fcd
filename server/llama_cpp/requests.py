"""What llama.cpp's /completion and /infill take, as prompts and `SamplingParams`."""

from functools import partial
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from configs.errors import InvalidRequest, shown
from configs.sampling import SamplingParams, StructuredOutput
from server.bodies import ModelRequest, Unsupported
from server.generation import Generation, GenerationOptions, Prompt, naming
from server.sampling import CommonSampling, LlamaSampling, NumLogprobs, TokenId, fitted, sampling_params
from server.serving import Serving
from server.structured import JsonSchema, json_schema

Piece = str | TokenId
Pieces = list[Piece]


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
NumPredict = Annotated[int, Field(ge=-2, lt=2**63)]


class NativeRequest(LlamaSampling, ModelRequest):
    """Samplers that there are not here are passed over and named, as all unknown fields."""

    random_seeds: ClassVar[tuple[int, ...]] = (-1, 2**32 - 1)

    n_predict: NumPredict | None = None
    """Most tokens to generate; -1 and -2 are as many as the context holds, 0 computes the prompt alone."""
    max_tokens: NumPredict | None = None
    """The same as n_predict."""
    n_cmpl: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """Answers of each prompt."""
    temperature: Annotated[float, AfterValidator(partial(max, 0.0))] | None = None
    """0 and less are greedy."""
    stop: str | tuple[str, ...] | None = None
    """Texts before which the answer ends; empty ones are none."""
    ignore_eos: bool | None = None
    logit_bias: dict[str, Bias] | list[tuple[Piece, Bias]] | None = None
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


_FIELD_NAMES = {"max_tokens": "n_predict", "n": "n_cmpl", "suffix": "input_suffix"}
_NEVER, _MOST_BIAS = -100.0, 100.0
_MAX_DIGITS = 20
"""Most digits of a token id; Python converts no more than some thousands."""
_FILE_SEPARATOR, _REPOSITORY = "<|file_sep|>", "<|repo_name|>"


async def native_generation(serving: Serving, body: NativeCompletionRequest | InfillRequest) -> Generation:
    """The generation that the request asks for. Raises `InvalidRequest` naming the field."""
    names = {**_FIELD_NAMES, "structured": "grammar" if body.json_schema is None else "json_schema"}
    names |= {"prompt": "input_prefix"} if isinstance(body, InfillRequest) else {}
    with naming(names):
        params = await _params(serving, body)
        items = [body] if isinstance(body, InfillRequest) else _prompts(body.prompt)
        serving.check_number_of_choices(len(items), params.n)
        prompts = []
        for item in items:
            token_ids = await (_token_ids(serving, item) if isinstance(item, list) else _infill(serving, item))
            fits = fitted(params, serving.engine.info.max_model_len - len(token_ids))
            serving.engine.validate(token_ids, fits)
            prompts.append(Prompt(token_ids, fits))
    return Generation(serving, prompts, GenerationOptions(field_names=names), id_prefix="native-")


async def _params(serving: Serving, body: NativeRequest) -> SamplingParams:
    """What the request asks for, over the checkpoint's own."""
    given = body.given_sampling(serving.config)
    limit = body.max_tokens if body.n_predict is None else body.n_predict
    given |= {
        "max_tokens": None if limit in (None, -1, -2) else limit,
        "n": body.n_cmpl or 1,
        "stop": tuple(filter(None, given["stop"])),
        "logprobs": body.n_probs or None,
        "logit_bias": await _biases(serving, body),
        "structured": _structured(body),
    }
    if body.ignore_eos is not None:
        given["ignore_eos"] = body.ignore_eos
    return sampling_params(given, serving.engine.default_sampling)


def settings(params: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """The parameters under llama.cpp's names."""
    return {
        **{name: getattr(params, name) for name in (*CommonSampling.model_fields, "ignore_eos")},
        "repeat_penalty": params.repetition_penalty,
        "n_ctx": max_model_len,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "n_probs": params.logprobs or 0,
        "seed": NativeRequest.random_seeds[-1] if params.seed is None else params.seed,
        "repeat_last_n": -1,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
    }


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
        if isinstance(piece, str) and not piece.isdecimal():
            token_ids = await serving.engine.encode(piece, add_special_tokens=False)
        elif len(str(piece)) > _MAX_DIGITS:
            raise InvalidRequest(f"logit_bias must be token ids; got {shown(piece)}", param="logit_bias")
        else:
            token_ids = [int(piece)]
        value = (0.0 if bias else _NEVER) if isinstance(bias, bool) else max(_NEVER, min(_MOST_BIAS, bias))
        found |= dict.fromkeys(token_ids, value)
    return found or None


def _prompts(given: Any) -> list[Pieces]:
    """The pieces of each prompt: a list with token ids and no lists in it is one prompt."""
    items = given if isinstance(given, list) else [given]
    if any(isinstance(item, int) for item in items) and not any(isinstance(item, list | dict) for item in items):
        return [items]
    texts = [item["prompt_string"] if isinstance(item, dict) else item for item in items]
    return [text if isinstance(text, list) else [text] for text in texts]


async def _token_ids(serving: Serving, pieces: Pieces) -> list[int]:
    """The token ids of a prompt. What the tokenizer puts before every text comes before one at the beginning."""
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
    """Token ids of prefix and suffix, behind other files, as in a repository where the model has tokens for that."""
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
