"""POST /v1/embeddings, /pooling, /score and /rerank, which all are embeddings of prompts."""

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from server.bodies import BodyRoute, ParsedRequest, Unsupported, one_of
from server.documented import given
from server.errors import error_statuses
from server.generation import naming
from server.metrics.records import note_response
from server.openai.base import ScheduledRequest
from server.openai.chat import ChatPromptFields
from server.openai.completions import TextsOrIds, prompt_list
from server.sampling import TruncateTo, truncated
from server.serving import Serving, ServingOf, own_cache_salt
from server.shortening import context_size, encode_part
from server.sse import until_disconnect
from server.structured import STRICT
from server.vectors import cosines, filled, shaped

router = APIRouter(route_class=BodyRoute, responses=error_statuses())

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


@STRICT
class Document(TypedDict):
    text: str


class RerankRequest(ScoringFields):
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS - 1)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Answer with this many of the best; 0, the default, with all."""
    return_documents: bool | None = None
    """False leaves the texts out of the answer."""


class PromptUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class _AnswerHead(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    """Unix seconds."""
    model: str
    usage: PromptUsage


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(_AnswerHead):
    data: list[Embedding]


class Pooled(TypedDict):
    object: Literal["pooling"]
    index: int
    data: list[float] | str


class Poolings(_AnswerHead):
    data: list[Pooled]


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class Scores(_AnswerHead):
    data: list[Score]


class RerankResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[Document]


class Rerank(TypedDict):
    id: str
    model: str
    usage: PromptUsage
    results: list[RerankResult]
    """The best first."""


@router.post("/v1/embeddings", response_model=Embeddings)
async def embeddings(body: EmbeddingRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Embed texts."""
    return await _embed(body, request, serving, "embd-", {"object": "embedding"}, "embedding", normalize=True)


@router.post("/pooling", response_model=Poolings)
async def pooling(body: PoolingRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Embed texts, as the model gives it."""
    return await _embed(body, request, serving, "pool-", {"object": "pooling"}, "data", normalize=False)


async def _embed(
    body: EmbeddingRequest,
    request: ParsedRequest,
    serving: Serving,
    id_prefix: str,
    item: dict[str, str],
    field: str,
    *,
    normalize: bool,
) -> Response:
    """`item` is what an item of the answer begins with, `field` is where the embedding stands."""
    one_of(body, "input", "messages")
    normalize = body.normalizes(normalize)
    work = Embedder(serving, body, await request.prepare(lambda: _input_prompts(serving, body)), id_prefix)
    vectors = await until_disconnect(request.receive, work.vectors())
    shapes = shaped(vectors, body.dimensions, normalize=normalize, as_base64=body.encoding_format == "base64")
    items = ({**item, "index": index, field: shape} for index, shape in enumerate(shapes))
    return Response(await filled(work.head(), "data", items), media_type="application/json")


@router.post("/score", response_model=Scores)
@router.post("/v1/score", response_model=Scores)
async def score(body: ScoreRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Cosines between embeddings."""

    async def prepared() -> tuple[list[list[int]], int]:
        first, second = _score_texts(body)
        return await prompts_of(serving, body, first + second), len(first)

    prompts, num_first = await request.prepare(prepared)
    work = Embedder(serving, body, prompts, "score-")
    values = await until_disconnect(request.receive, work.cosines(num_first))
    data = [{"object": "score", "index": index, "score": value} for index, value in enumerate(values)]
    return Response(msgspec.json.encode({**work.head(), "data": data}), media_type="application/json")


@router.post("/rerank", response_model=Rerank)
@router.post("/v1/rerank", response_model=Rerank)
@router.post("/v2/rerank", response_model=Rerank)
@router.post("/reranking", response_model=Rerank)
async def rerank(body: RerankRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Sort documents for a query."""
    texts = [document if isinstance(document, str) else document["text"] for document in body.documents]
    query = TextToEmbed(body.query, "query", body.max_tokens_per_query or 0)
    documents = _texts(texts, "documents", body.max_tokens_per_doc)
    prompts = await request.prepare(lambda: prompts_of(serving, body, [query, *documents]))
    work = Embedder(serving, body, prompts, "rerank-")
    values = await until_disconnect(request.receive, work.cosines(1))
    results: list[RerankResult] = []
    for index in sorted(range(len(texts)), key=lambda index: -values[index])[: body.top_n or None]:
        result: RerankResult = {"index": index, "relevance_score": values[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    head = work.head()
    answer: Rerank = {"id": head["id"], "model": head["model"], "usage": head["usage"], "results": results}
    return Response(msgspec.json.encode(answer), media_type="application/json")


@dataclass(frozen=True)
class TextToEmbed:
    """A text or token ids."""

    content: str | list[int]
    field: str
    """Of the request, for errors."""
    max_tokens: int = 0
    """Keep only this many tokens, the first; 0 keeps all."""


class Embedder:
    """Embeds the prompts of one request."""

    def __init__(self, serving: Serving, body: PoolingFields, prompts: list[list[int]], id_prefix: str) -> None:
        self.serving = serving
        self.body = body
        self.prompts = prompts
        self.id = id_prefix + uuid.uuid4().hex
        note_response(self.id)
        self.created = int(time.time())

    def head(self) -> _AnswerHead:
        num_tokens = sum(map(len, self.prompts))
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.serving.model.id,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    async def vectors(self) -> list[list[float]]:
        """As the model gives them, of any length."""
        setting = self.serving.config.pooling
        return await self.serving.engine.embed(
            self.prompts,
            request_id=self.id,
            pooling=self.body.pooling or (self.serving.engine.default_pooling if setting == "auto" else setting),
            priority=self.body.priority or 0,
            cache_salt=own_cache_salt(self.body.cache_salt),
            deadline=self.serving.deadline(self.body.timeout_s),
        )

    async def cosines(self, num_first: int) -> list[float]:
        """Of the first prompts with the others, pair by pair; a single first one belongs to all pairs."""
        return await asyncio.to_thread(cosines, await self.vectors(), num_first)


async def _input_prompts(serving: Serving, body: EmbeddingRequest) -> list[list[int]]:
    """One per input, checked, as all else of the request is. Raises `InvalidRequest`."""
    if body.messages is not None:
        opened, special = bool(body.add_generation_prompt), bool(body.add_special_tokens)
        chat = await body.render(serving, opened=opened, special=special)
        return [_checked(serving, body, chat.token_ids, "messages")]
    body.check_without_messages()
    return await prompts_of(serving, body, [TextToEmbed(given, "input") for given in prompt_list(body.input)])


async def prompts_of(serving: Serving, body: PoolingFields, texts: list[TextToEmbed]) -> list[list[int]]:
    """Token ids of each, checked. Raises `InvalidRequest` naming the field."""
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"a request may have {MAX_INPUTS} texts; got {len(texts)}", param=texts[-1].field)
    prompts = []
    for text in texts:
        content = text.content
        if isinstance(content, str):
            with naming({"prompt": text.field}):
                content = await _encode(serving, body, content, text.max_tokens)
            await asyncio.sleep(0)  # other requests' turn
        content = content[: text.max_tokens] if text.max_tokens else content
        prompts.append(_checked(serving, body, content, text.field))
    return prompts


async def _encode(serving: Serving, body: PoolingFields, text: str, max_tokens: int) -> list[int]:
    """The text's token ids, but most of those that are cut off; all where none may be. Raises `InvalidRequest`."""
    special, limit = body.add_special_tokens is not False, body.truncate_prompt_tokens
    if max_tokens:
        return await encode_part(serving, text, max_tokens, "right", add_special_tokens=special)
    if limit is None:
        return await serving.engine.encode(text, add_special_tokens=special, must_fit=True)
    kept = context_size(serving) if limit == -1 else limit
    return await encode_part(serving, text, kept, body.truncation_side or "left", add_special_tokens=special)


def _checked(serving: Serving, body: PoolingFields, token_ids: list[int], field: str) -> list[int]:
    """Cut as the request says. Raises `InvalidRequest` for what does not fit the model."""
    limit, side = body.truncate_prompt_tokens, body.truncation_side or "left"
    token_ids = truncated(token_ids, limit, context_size(serving), side)
    with naming({"prompt": field}):
        serving.engine.validate(token_ids, SamplingParams(max_tokens=0))
    return token_ids


def _score_texts(body: ScoreRequest) -> tuple[list[TextToEmbed], list[TextToEmbed]]:
    """Two lists of the same length, or one text and several. Raises `InvalidRequest`."""
    names = dict.fromkeys(name for pair in PAIRS for name in pair)
    given = tuple(name for name in names if getattr(body, name) is not None)
    if given not in PAIRS:
        pairs = ", or ".join(" and ".join(pair) for pair in PAIRS)
        field = given[0] if given else PAIRS[0][0]
        raise InvalidRequest(f"give {pairs}; got {' and '.join(given) or 'none'}", param=field)
    first = _texts(getattr(body, given[0]), given[0], body.max_tokens_per_query)
    second = _texts(getattr(body, given[1]), given[1], body.max_tokens_per_doc)
    if len(first) not in (1, len(second)):
        message = f"{given[0]} holds one text or as many as {given[1]}; got {len(first)} and {len(second)}"
        raise InvalidRequest(message, param=given[0])
    return first, second


def _texts(texts: Texts, field: str, max_tokens: int | None) -> list[TextToEmbed]:
    given = [texts] if isinstance(texts, str) else texts
    return [TextToEmbed(text, field, max_tokens or 0) for text in given]
