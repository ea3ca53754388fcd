"""POST /v1/embeddings, /pooling, /score and /rerank, which all are embeddings of prompts."""

import asyncio
import base64
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from server.bodies import BodyRoute, ParsedRequest, Unsupported, one_of
from server.documented import given
from server.errors import error_statuses
from server.generation import naming, new_ids
from server.metrics.records import note_response
from server.openai.base import PromptUsage, ScheduledRequest
from server.openai.chat import ChatPromptFields
from server.openai.completions import TextsOrIds, prompt_list
from server.preparation import Work
from server.sampling import TruncateTo, truncated
from server.serving import Serving, ServingOf, own_cache_salt
from server.shortening import context_size, encode_part
from server.sse import until_disconnect

router = APIRouter(route_class=BodyRoute, tags=["OpenAI"], responses=error_statuses())

MAX_INPUTS = 2048
"""Of one request, as at OpenAI's."""
Texts = str | Annotated[list[str], Field(min_length=1)]
NumTokens = Annotated[int, Field(ge=0)]


class PoolingFields(ScheduledRequest):
    """How prompts become embeddings."""

    pooling: Literal["last", "mean"] | None = None
    """Of the final hidden states: that of the last token, or their mean (default: the server's setting)."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's own tokens, such as the beginning of sequence, around it (default true; of chats false)."""
    truncate_prompt_tokens: TruncateTo | None = None
    """Keep only this many tokens of each prompt; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """What is cut off: left, the default, keeps the last tokens."""
    mm_processor_kwargs: Annotated[Any, Unsupported(({},))] = None
    media_io_kwargs: Annotated[Any, Unsupported(({},))] = None
    padding: Annotated[Any, Unsupported(("do_not_pad",))] = None
    user: Any = None
    """A label."""


class EmbeddingRequest(PoolingFields, ChatPromptFields):
    """Either `input` or `messages`, of which the chat's whole prompt is embedded."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given("input"), given("messages")]})

    input: TextsOrIds | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the base64 form of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Keep only this many numbers of each embedding, the first; they are scaled to length 1 again."""
    normalize: bool | None = None
    """Scale embeddings to length 1 (default true; of /pooling false)."""
    use_activation: bool | None = None
    """The same as `normalize`."""
    embd_normalize: Literal[-1, 2] | None = None
    """The same as `normalize`: 2 scales to (Euclidean) length 1, -1 does not."""
    embed_dtype: Annotated[Any, Unsupported(("float32",))] = None
    endianness: Annotated[Any, Unsupported(("little", "native"))] = None

    def normalizes(self, default: bool) -> bool:
        """Whether embeddings are scaled to length 1, by any of the names. Raises `InvalidRequest`."""
        by_size = None if self.embd_normalize is None else self.embd_normalize == 2
        given = {"normalize": self.normalize, "use_activation": self.use_activation, "embd_normalize": by_size}
        said = {value for value in given.values() if value is not None}
        if len(said) > 1:
            names = [name for name, value in given.items() if value is not None]
            raise InvalidRequest(f"{' and '.join(names)} contradict each other", param=names[1])
        return said.pop() if said else default


class PoolingRequest(EmbeddingRequest):
    task: Literal["embed"] | None = None


class ScoringFields(PoolingFields):
    """Scores are cosines of the embeddings' angles."""

    max_tokens_per_query: NumTokens | None = None
    """Keep only this many tokens of the query, the first; 0 keeps all."""
    max_tokens_per_doc: NumTokens | None = None
    """Keep only this many tokens of each document, the first; 0 keeps all."""
    chat_template_kwargs: Annotated[Any, Unsupported(({},))] = None
    instruction: Annotated[Any, Unsupported()] = None
    use_activation: Annotated[Any, Unsupported()] = None


PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


class ScoreRequest(ScoringFields):
    """One text against each of several, or two lists of the same length in pairs, under one of four pairs of names."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given(*pair) for pair in PAIRS]})

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None


class Document(TypedDict):
    text: str


class RerankRequest(ScoringFields):
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS - 1)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Answer with this many of the best; 0, the default, with all."""
    return_documents: bool | None = None
    """False leaves the texts out of the answer."""


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Pooled(TypedDict):
    object: Literal["pooling"]
    index: int
    data: list[float] | str


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class EmbeddingHead(TypedDict):
    id: str
    model: str
    usage: PromptUsage


Item = TypeVar("Item")


class ListOf(EmbeddingHead, Generic[Item]):
    object: Literal["list"]
    created: int
    """Unix seconds."""
    data: list[Item]


class RerankResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[Document]


class Rerank(EmbeddingHead):
    results: list[RerankResult]
    """The best first."""


@router.post("/v1/embeddings", response_model=ListOf[Embedding])
async def embeddings(body: EmbeddingRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Embed texts."""
    return await _embed(body, request, serving, "embedding")


@router.post("/pooling", response_model=ListOf[Pooled])
async def pooling(body: PoolingRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Embed texts, as the model gives it."""
    return await _embed(body, request, serving, "pooling")


_KINDS = {"embedding": ("embd-", "embedding"), "pooling": ("pool-", "data")}
"""Of items: what the answer's id begins with, and the field in which an embedding stands."""


async def _embed(body: EmbeddingRequest, request: ParsedRequest, serving: Serving, kind: str) -> Response:
    id_prefix, field = _KINDS[kind]
    one_of(body, "input", "messages")
    normalize = body.normalizes(default=kind == "embedding")
    head, vectors = await embedded(request, serving, body, lambda: _input_prompts(serving, body), id_prefix)
    shapes = shaped(vectors, body.dimensions, normalize=normalize, as_base64=body.encoding_format == "base64")
    items = ({"object": kind, "index": index, field: shape} for index, shape in enumerate(shapes))
    head_of_list = {**head, "object": "list", "created": int(time.time())}
    return Response(await filled(head_of_list, "data", items), media_type="application/json")


@router.post("/score", response_model=ListOf[Score])
@router.post("/v1/score", response_model=ListOf[Score])
async def score(body: ScoreRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Cosines between embeddings."""
    head, values = await _scores(body, request, serving, _score_texts(body), "score-")
    data = [{"object": "score", "index": index, "score": value} for index, value in enumerate(values)]
    answer = {**head, "object": "list", "created": int(time.time()), "data": data}
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/rerank", response_model=Rerank)
@router.post("/v1/rerank", response_model=Rerank)
@router.post("/v2/rerank", response_model=Rerank)
@router.post("/reranking", response_model=Rerank)
async def rerank(body: RerankRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Sort documents for a query."""
    documents = [document if isinstance(document, str) else document["text"] for document in body.documents]
    inputs: Inputs = {
        "query": ([body.query], body.max_tokens_per_query),
        "documents": (documents, body.max_tokens_per_doc),
    }
    head, values = await _scores(body, request, serving, inputs, "rerank-")
    results: list[RerankResult] = []
    for index in sorted(range(len(values)), key=lambda index: -values[index])[: body.top_n or None]:
        result: RerankResult = {"index": index, "relevance_score": values[index]}
        if body.return_documents is not False:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return Response(msgspec.json.encode({**head, "results": results}), media_type="application/json")


Inputs = Mapping[str, tuple[Sequence[str | list[int]], int | None]]
"""By field of the request: texts or token ids, and how many tokens, the first, are kept of each; 0 and None: all."""


def _score_texts(body: ScoreRequest) -> Inputs:
    """The two fields of the request that hold texts: lists of one length, or one text and several.

    Raises `InvalidRequest`.
    """
    names = dict.fromkeys(name for pair in PAIRS for name in pair)
    texts = {
        name: [given] if isinstance(given, str) else given
        for name in names
        if (given := getattr(body, name)) is not None
    }
    if tuple(texts) not in PAIRS:
        pairs = ", or ".join(" and ".join(pair) for pair in PAIRS)
        message = f"give {pairs}; got {' and '.join(texts) or 'none'}"
        raise InvalidRequest(message, param=next(iter(texts), PAIRS[0][0]))
    (first_name, first), (second_name, second) = texts.items()
    if len(first) not in (1, len(second)):
        message = f"{first_name} holds one text or as many as {second_name}; got {len(first)} and {len(second)}"
        raise InvalidRequest(message, param=first_name)
    return {first_name: (first, body.max_tokens_per_query), second_name: (second, body.max_tokens_per_doc)}


async def _scores(
    body: PoolingFields, request: ParsedRequest, serving: Serving, inputs: Inputs, id_prefix: str
) -> tuple[EmbeddingHead, list[float]]:
    """What the answer begins with, and `cosines` of the first field's texts with the second's."""
    head, vectors = await embedded(request, serving, body, lambda: prompts_of(serving, body, inputs), id_prefix)
    num_first = len(next(iter(inputs.values()))[0])
    return head, await asyncio.to_thread(cosines, vectors, num_first)


async def embedded(
    request: ParsedRequest, serving: Serving, body: PoolingFields, prompting: Work[list[list[int]]], id_prefix: str
) -> tuple[EmbeddingHead, list[list[float]]]:
    """What the answer begins with, and the embeddings of what `prompting` gives: as the model has them, of any length.

    Raises what `prompting` raises.
    """
    prompts = await request.prepare(prompting)
    num_tokens = sum(map(len, prompts))
    answer_id, engine_id = new_ids(serving, id_prefix, body.request_id)
    head: EmbeddingHead = {
        "id": answer_id,
        "model": serving.model.id,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    note_response(answer_id)
    setting = serving.config.pooling
    work = serving.engine.embed(
        prompts,
        request_id=engine_id,
        pooling=body.pooling or (serving.engine.default_pooling if setting == "auto" else setting),
        priority=body.priority or 0,
        cache_salt=own_cache_salt(body.cache_salt),
        deadline=serving.deadline(body.timeout_s),
    )
    return head, await until_disconnect(request.receive, work)


async def _input_prompts(serving: Serving, body: EmbeddingRequest) -> list[list[int]]:
    """Token ids of each input, or of the chat. Raises `InvalidRequest` for them, or for any field beside them."""
    chat = body.model_copy(update={"add_generation_prompt": bool(body.add_generation_prompt)})
    token_ids = await chat.prompt_of_messages(serving, special=bool(body.add_special_tokens))
    if token_ids is not None:
        return await prompts_of(serving, body, {"messages": ([token_ids], None)})
    return await prompts_of(serving, body, {"input": (prompt_list(body.input), None)})


async def prompts_of(serving: Serving, body: PoolingFields, inputs: Inputs) -> list[list[int]]:
    """Token ids of each, cut as the request says, and checked. Raises `InvalidRequest` naming the field."""
    if (count := sum(len(texts) for texts, _ in inputs.values())) > MAX_INPUTS:
        raise InvalidRequest(f"a request may have {MAX_INPUTS} texts; got {count}", param=[*inputs][-1])
    limit, side, room = body.truncate_prompt_tokens, body.truncation_side or "left", context_size(serving)
    prompts = []
    for field, (texts, max_tokens) in inputs.items():
        for text in texts:
            with naming({"prompt": field}):
                whole = text if isinstance(text, list) else await _encode(serving, body, text, max_tokens)
                token_ids = truncated(whole[: max_tokens or None], limit, room, side)
                serving.engine.validate(token_ids, SamplingParams(max_tokens=0))
            prompts.append(token_ids)
            await asyncio.sleep(0)  # other requests' turn
    return prompts


async def _encode(serving: Serving, body: PoolingFields, text: str, max_tokens: int | None) -> list[int]:
    """The text's token ids, but most of those that are cut off; all where none may be. Raises `InvalidRequest`."""
    special, kept, side = body.add_special_tokens is not False, body.truncate_prompt_tokens, body.truncation_side
    if max_tokens:
        kept, side = max_tokens, "right"
    if kept is None:
        return await serving.engine.encode(text, add_special_tokens=special, must_fit=True)
    kept = context_size(serving) if kept == -1 else kept
    return await encode_part(serving, text, kept, side or "left", add_special_tokens=special)


Vectors = npt.NDArray[np.float64]
"""One embedding per row."""


def normalized(vectors: Vectors) -> Vectors:
    """The vectors scaled to (Euclidean) length 1; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)


def cosines(vectors: list[list[float]], num_first: int) -> list[float]:
    """Cosines of the first vectors with the others, pair by pair; a single first one belongs to all pairs."""
    unit = normalized(np.stack([np.array(vector) for vector in vectors]))  # each call holds the interpreter's lock
    found: list[float] = (unit[:num_first] * unit[num_first:]).sum(axis=1).tolist()
    return found


def shaped(
    vectors: list[list[float]], dimensions: int | None, *, normalize: bool, as_base64: bool
) -> Iterator[list[float] | str]:
    """Embeddings of so many dimensions, as numbers or as base64 of little-endian float32.

    Raises `InvalidRequest` for more dimensions than the model has, before the first.
    """
    size = len(vectors[0])
    if dimensions is not None and dimensions > size:
        message = f"dimensions must be between 1 and {size}, the model's hidden size; got {dimensions}"
        raise InvalidRequest(message, param="dimensions")

    def shape(vector: list[float]) -> list[float] | str:
        row = np.array([vector[:dimensions]])
        row = normalized(row) if normalize else row
        numbers: list[float] | str
        numbers = base64.b64encode(row.astype("<f4").tobytes()).decode() if as_base64 else row[0].tolist()
        return numbers

    return map(shape, vectors)


async def filled(head: Mapping[str, object], field: str, items: Iterable[object]) -> bytes:
    """The JSON of `head` with one more field: a list that is made item by item, each of which holds the
    interpreter's lock."""

    def encoded() -> bytes:
        joined = b",".join([msgspec.json.encode(item) for item in items])
        return msgspec.json.encode(head)[:-1] + b"," + msgspec.json.encode(field) + b":[" + joined + b"]}"

    return await asyncio.to_thread(encoded)
