"""From the fields of /v1/embeddings, /pooling, /score and /rerank to prompts, and from embeddings to answers."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from server.bodies import invalid_request
from server.embedding import as_base64, cosine, normalized
from server.field_names import naming
from server.openai.completions import prompt_list
from server.openai.messages import Messages
from server.protocol.pooling import (
    MAX_INPUTS,
    SCORE_PAIRS,
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
    Texts,
)
from server.sampling import truncated
from server.serving import Serving
from server.tokenization import check_chat_fields, rendered_chat


@dataclass(frozen=True)
class Piece:
    """A text or token ids to embed."""

    content: str | list[int]
    field: str
    """Of the request, for errors."""
    max_tokens: int = 0
    """Keep only this many tokens, the first; 0 keeps all."""


async def input_prompts(serving: Serving, body: EmbeddingRequest) -> list[list[int]]:
    """One per input, checked, as all else of the request is. Raises `InvalidRequest`."""
    normalizes(body, default=True)
    if body.messages is not None:
        opened = bool(body.add_generation_prompt)
        try:
            TypeAdapter(Messages).validate_python(body.messages)
        except ValidationError as error:
            raise InvalidRequest(str(invalid_request(error)), param="messages") from None
        chat = await rendered_chat(serving, body, add_generation_prompt=opened, special=bool(body.add_special_tokens))
        return [_checked(serving, body, chat.token_ids, "messages")]
    assert body.input is not None, body
    check_chat_fields(body)
    return await prompts_of(serving, body, [Piece(given, "input") for given in texts_or_ids(body.input)])


def texts_or_ids(given: Any) -> list[str | list[int]]:
    """One per text. Raises `InvalidRequest`."""
    if given == []:
        raise InvalidRequest("input is an empty list", param="input")
    if isinstance(given, list) and len({type(item) for item in given}) > 1:
        raise InvalidRequest("input mixes texts, token ids and lists", param="input")
    return prompt_list(given)


async def prompts_of(serving: Serving, body: PoolingFields, pieces: list[Piece]) -> list[list[int]]:
    """Raises `InvalidRequest` naming the field."""
    if len(pieces) > MAX_INPUTS:
        raise InvalidRequest(f"a request may have {MAX_INPUTS} texts; got {len(pieces)}", param=pieces[-1].field)
    prompts = []
    for piece in pieces:
        content = piece.content
        if isinstance(content, str):
            content = await _encode(serving, body, piece, content)
            await asyncio.sleep(0)  # other requests' turn
        content = content[: piece.max_tokens] if piece.max_tokens else content
        prompts.append(_checked(serving, body, content, piece.field))
    return prompts


async def _encode(serving: Serving, body: PoolingFields, piece: Piece, text: str) -> list[int]:
    must_fit = body.truncate_prompt_tokens is None and not piece.max_tokens
    with naming({"prompt": piece.field}):
        return await serving.engine.encode(
            text, add_special_tokens=body.add_special_tokens is not False, must_fit=must_fit
        )


def _checked(serving: Serving, body: PoolingFields, token_ids: list[int], field: str) -> list[int]:
    """Cut as the request says. Raises `InvalidRequest` for what does not fit the model."""
    info = serving.engine.info
    room = min(info.max_model_len, info.kv_cache_tokens)
    token_ids = truncated(token_ids, body.truncate_prompt_tokens, room, body.truncation_side or "left")
    with naming({"prompt": field}):
        serving.engine.validate(token_ids, SamplingParams(max_tokens=0))
    return token_ids


def shaped(vectors: list[list[float]], body: EmbeddingRequest, *, normalize: bool) -> Iterator[list[float] | str]:
    """Embeddings of the size and form that the request asks for. Raises `InvalidRequest` for too many dimensions."""
    size = len(vectors[0]) if body.dimensions is None else body.dimensions
    if not 1 <= size <= len(vectors[0]):
        message = f"dimensions must be between 1 and {len(vectors[0])}, the model's hidden size; got {size}"
        raise InvalidRequest(message, param="dimensions")
    for vector in vectors:
        cut = normalized(vector[:size]) if normalize else vector[:size]
        yield as_base64(cut) if body.encoding_format == "base64" else cut


def normalizes(body: EmbeddingRequest, default: bool) -> bool:
    """Whether embeddings are scaled to length 1, by any of the names. Raises `InvalidRequest`."""
    by_size = None if body.embd_normalize is None else body.embd_normalize == 2
    given = {"normalize": body.normalize, "use_activation": body.use_activation, "embd_normalize": by_size}
    said = {value for value in given.values() if value is not None}
    if len(said) > 1:
        names = [name for name, value in given.items() if value is not None]
        raise InvalidRequest(f"{' and '.join(names)} contradict each other", param=names[1])
    return said.pop() if said else default


def score_pieces(body: ScoreRequest) -> tuple[list[Piece], list[Piece]]:
    """Two lists of the same length, or one text and several. Raises `InvalidRequest`."""
    names = dict.fromkeys(name for pair in SCORE_PAIRS for name in pair)
    given = tuple(name for name in names if getattr(body, name) is not None)
    if given not in SCORE_PAIRS:
        pairs = ", or ".join(" and ".join(pair) for pair in SCORE_PAIRS)
        field = given[0] if given else SCORE_PAIRS[0][0]
        raise InvalidRequest(f"give {pairs}; got {' and '.join(given) or 'none'}", param=field)
    first = _pieces(getattr(body, given[0]), given[0], _limit(body, "max_tokens_per_query"))
    second = _pieces(getattr(body, given[1]), given[1], _limit(body, "max_tokens_per_doc"))
    if len(first) not in (1, len(second)):
        message = f"{given[0]} holds one text or as many as {given[1]}; got {len(first)} and {len(second)}"
        raise InvalidRequest(message, param=given[0])
    return first, second


def rerank_pieces(body: RerankRequest) -> tuple[Piece, list[Piece]]:
    """The query and the documents. Raises `InvalidRequest`."""
    if body.top_n is not None and body.top_n < 0:
        raise InvalidRequest(f"top_n must be at least 0; got {body.top_n}", param="top_n")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    documents = _pieces(texts, "documents", _limit(body, "max_tokens_per_doc"))
    return Piece(body.query, "query", _limit(body, "max_tokens_per_query")), documents


def scores(first: list[list[float]], second: list[list[float]]) -> list[float]:
    """Cosines pair by pair; a single one of `first` belongs to all pairs."""
    ones = [normalized(vector) for vector in first]
    ones = ones * len(second) if len(ones) == 1 else ones
    return [cosine(one, normalized(other)) for one, other in zip(ones, second, strict=True)]


def _pieces(texts: Texts, field: str, max_tokens: int) -> list[Piece]:
    given = [texts] if isinstance(texts, str) else texts
    if not given:
        raise InvalidRequest(f"{field} is an empty list", param=field)
    return [Piece(text, field, max_tokens) for text in given]


def _limit(body: ScoreRequest | RerankRequest, field: str) -> int:
    limit: int = getattr(body, field) or 0
    if limit < 0:
        raise InvalidRequest(f"{field} must be at least 0; got {limit}", param=field)
    return limit
