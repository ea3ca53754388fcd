"""POST /v1/embeddings, /pooling, /score and /rerank."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from server.convert.pooling import (
    Piece,
    normalizes,
    prompts_of,
    rerank_pieces,
    score_pieces,
    scores,
    shaped,
)
from server.metrics.records import note_response
from server.protocol.pooling import (
    Document,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    Pooled,
    PoolingFields,
    PoolingRequest,
    PoolingResponse,
    PromptUsage,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from server.serving import Serving, own_cache_salt

Shape = list[float] | str
"""An embedding as the request wants it."""


class Embeddings:
    """One request's embeddings: what all answers begin and end with."""

    def __init__(self, serving: Serving, body: PoolingFields, prompts: list[list[int]], id_prefix: str) -> None:
        self.serving = serving
        self.body = body
        self.prompts = prompts
        self.id = id_prefix + uuid.uuid4().hex
        note_response(self.id)
        self.created = int(time.time())
        self.model = serving.model.id
        num_tokens = sum(map(len, prompts))
        self.usage = PromptUsage(num_tokens, num_tokens)

    def _pooling(self) -> Literal["last", "mean"]:
        setting = self.serving.config.pooling
        return self.body.pooling or (self.serving.engine.default_pooling if setting == "auto" else setting)

    async def vectors(self) -> list[list[float]]:
        """As the model gives them, of any length."""
        return await self.serving.engine.embed(
            self.prompts,
            request_id=self.id,
            pooling=self._pooling(),
            priority=self.body.priority or 0,
            cache_salt=own_cache_salt(self.body.cache_salt),
            deadline=self.serving.deadline(self.body.timeout_s),
        )

    async def shapes(self, body: EmbeddingRequest, normalize: bool) -> Iterable[Shape]:
        """As `body` asks for them."""
        return shaped(await self.vectors(), body, normalize=normalize)


async def embeddings(serving: Serving, body: EmbeddingRequest, prompts: list[list[int]]) -> bytes:
    work = Embeddings(serving, body, prompts, "embd-")
    whole = EmbeddingResponse(id=work.id, created=work.created, model=work.model, usage=work.usage, data=[])
    shapes = await work.shapes(body, normalizes(body, default=True))
    return await with_items(whole, shapes, lambda index, shape: Embedding(index=index, embedding=shape))


async def pooling(serving: Serving, body: PoolingRequest, prompts: list[list[int]]) -> bytes:
    work = Embeddings(serving, body, prompts, "pool-")
    whole = PoolingResponse(id=work.id, created=work.created, model=work.model, usage=work.usage, data=[])
    shapes = await work.shapes(body, normalizes(body, default=False))
    return await with_items(whole, shapes, lambda index, shape: Pooled(index=index, data=shape))


async def with_items(
    whole: msgspec.Struct, shapes: Iterable[Shape], item: Callable[[int, Shape], object] = lambda _, shape: shape
) -> bytes:
    """The JSON of `whole`, whose one empty list is filled item by item: each holds the interpreter's lock."""

    def encoded() -> bytes:
        items = b",".join([msgspec.json.encode(item(index, shape)) for index, shape in enumerate(shapes)])
        head, _, tail = msgspec.json.encode(whole).rpartition(b"[]")
        return head + b"[" + items + b"]" + tail

    return await asyncio.to_thread(encoded)


async def score_prompts(serving: Serving, body: ScoreRequest) -> tuple[list[list[int]], int]:
    """The prompts of both kinds, and how many are of the first."""
    first, second = score_pieces(body)
    return await prompts_of(serving, body, first + second), len(first)


async def score(serving: Serving, body: ScoreRequest, prepared: tuple[list[list[int]], int]) -> bytes:
    prompts, num_first = prepared
    work = Embeddings(serving, body, prompts, "score-")
    values = await _scores(work, num_first)
    data = [Score(index=index, score=value) for index, value in enumerate(values)]
    return msgspec.json.encode(
        ScoreResponse(id=work.id, created=work.created, model=work.model, usage=work.usage, data=data)
    )


async def rerank_prompts(serving: Serving, body: RerankRequest) -> tuple[list[list[int]], list[Piece]]:
    """The prompts of query and documents, and the documents."""
    query, documents = rerank_pieces(body)
    return await prompts_of(serving, body, [query, *documents]), documents


async def rerank(serving: Serving, body: RerankRequest, prepared: tuple[list[list[int]], list[Piece]]) -> bytes:
    prompts, documents = prepared
    work = Embeddings(serving, body, prompts, "rerank-")
    values = await _scores(work, 1)
    best = sorted(range(len(documents)), key=lambda index: -values[index])[: body.top_n or None]
    with_text = body.return_documents is not False
    results = [
        RerankResult(index, values[index], Document(str(documents[index].content)) if with_text else None)
        for index in best
    ]
    return msgspec.json.encode(RerankResponse(id=work.id, model=work.model, usage=work.usage, results=results))


async def _scores(work: Embeddings, num_first: int) -> list[float]:
    """Of the first `num_first` prompts with the others."""
    vectors = await work.vectors()
    return await asyncio.to_thread(scores, vectors[:num_first], vectors[num_first:])
