"""From the fields of llama.cpp's /completion and /infill to prompts and `SamplingParams`."""

from typing import Any

from configs.errors import InvalidRequest, shown
from configs.sampling import SamplingParams, StructuredOutput
from server.field_names import naming
from server.generation import Generation, Prompt
from server.protocol.llama_cpp import InfillRequest, NativeCompletionRequest, NativeRequest, Piece
from server.sampling import NEUTRAL_PENALTIES, check_stop, fitted, is_penalised, sampling_params
from server.serving import Serving
from server.structured import json_schema

SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
"""Fields that mean the same in `SamplingParams`."""
RANDOM_SEEDS = (-1, 2**32 - 1)
NEVER, MOST_BIAS = -100.0, 100.0
MAX_DIGITS = 20
"""Most digits of a token id; Python converts no more than some thousands."""
FILE_SEPARATOR, REPOSITORY = "<|file_sep|>", "<|repo_name|>"


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
        params = await native_params(serving, body)
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


async def native_params(serving: Serving, body: NativeRequest) -> SamplingParams:
    """What the request asks for, over the checkpoint's own."""
    given: dict[str, Any] = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.temperature is not None:
        given["temperature"] = max(0.0, body.temperature)
    if body.repeat_penalty is not None:
        given["repetition_penalty"] = body.repeat_penalty
    if body.repeat_last_n == 0:
        given |= NEUTRAL_PENALTIES
    if body.seed is not None and body.seed not in RANDOM_SEEDS:
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
        "seed": RANDOM_SEEDS[1] if params.seed is None else params.seed,
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
            if len(str(piece)) > MAX_DIGITS:
                raise InvalidRequest(f"logit_bias must be token ids; got {shown(piece)}", param="logit_bias")
            token_ids = [int(piece)]
        else:
            token_ids = await serving.engine.encode(piece, add_special_tokens=False)
        value = (0.0 if bias else NEVER) if isinstance(bias, bool) else max(NEVER, min(MOST_BIAS, bias))
        found |= dict.fromkeys(token_ids, value)
    return found or None


def _prompts(given: Any) -> list[list[Piece]]:
    """The pieces of each. Raises `InvalidRequest`."""
    if not isinstance(given, list):
        return [_pieces(given)]
    is_one = not any(isinstance(item, list | dict) for item in given) and any(isinstance(item, int) for item in given)
    if not given:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    return [_pieces(given)] if is_one else [_pieces(item) for item in given]


def _pieces(given: Any) -> list[Piece]:
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise InvalidRequest("images and audio are not supported, only text", param="prompt")
        given = given.get("prompt_string")
        if not isinstance(given, str):
            raise InvalidRequest("an object as a prompt has a text as prompt_string", param="prompt")
    return given if isinstance(given, list) else [given]


async def _token_ids(serving: Serving, pieces: list[Piece]) -> list[int]:
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
    if engine.tokenizer.special_id(FILE_SEPARATOR) is None:
        text = "".join(f"{extra.text}\n" for extra in body.input_extra)
    else:
        files = "".join(f"{FILE_SEPARATOR}{extra.filename}\n{extra.text}\n" for extra in body.input_extra)
        text = f"{REPOSITORY}myproject\n{files}{FILE_SEPARATOR}filename\n"
    begins = token_ids[:1] == [engine.tokenizer.bos_token_id]
    others = await engine.encode(text, add_special_tokens=False, must_fit=True)
    return [*token_ids[:begins], *others, *token_ids[begins:]]
