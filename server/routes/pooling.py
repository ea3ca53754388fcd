"""POST /v1/embeddings, /pooling, /score and /rerank."""

import asyncio
import time
import uuid

from server.convert.pooling import (
    input_prompts,
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


class _Embedding:
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

    async def vectors(self) -> list[list[float]]:
        """As the model gives them, of any length."""
        return await self.serving.engine.embed(
            self.prompts,
            request_id=self.id,
            pooling=self.body.pooling or self.serving.config.pooling,
            priority=self.body.priority or 0,
            cache_salt=own_cache_salt(self.body.cache_salt),
            deadline=self.serving.deadline(self.body.timeout_s),
        )


async def embeddings(serving: Serving, body: EmbeddingRequest) -> EmbeddingResponse:
    normalize = normalizes(body, default=True)
    work = _Embedding(serving, body, await input_prompts(serving, body), "embd-")
    shapes = await _shaped(work, body, normalize)
    data = [Embedding(index=index, embedding=shape) for index, shape in enumerate(shapes)]
    return EmbeddingResponse(id=work.id, created=work.created, model=work.model, usage=work.usage, data=data)


async def pooling(serving: Serving, body: PoolingRequest) -> PoolingResponse:
    normalize = normalizes(body, default=False)
    work = _Embedding(serving, body, await input_prompts(serving, body), "pool-")
    shapes = await _shaped(work, body, normalize)
    data = [Pooled(index=index, data=shape) for index, shape in enumerate(shapes)]
    return PoolingResponse(id=work.id, created=work.created, model=work.model, usage=work.usage, data=data)


async def score(serving: Serving, body: ScoreRequest) -> ScoreResponse:
    first, second = score_pieces(body)
    work = _Embedding(serving, body, await prompts_of(serving, body, first + second), "score-")
    values = await _scores(work, len(first))
    data = [Score(index=index, score=value) for index, value in enumerate(values)]
    return ScoreResponse(id=work.id, created=work.created, model=work.model, usage=work.usage, data=data)


async def rerank(serving: Serving, body: RerankRequest) -> RerankResponse:
    query, documents = rerank_pieces(body)
    work = _Embedding(serving, body, await prompts_of(serving, body, [query, *documents]), "rerank-")
    values = await _scores(work, 1)
    best = sorted(range(len(documents)), key=lambda index: -values[index])[: body.top_n or None]
    with_text = body.return_documents is not False
    results = [
        RerankResult(index, values[index], Document(str(documents[index].content)) if with_text else None)
        for index in best
    ]
    return RerankResponse(id=work.id, model=work.model, usage=work.usage, results=results)


async def _shaped(work: _Embedding, body: EmbeddingRequest, normalize: bool) -> list[list[float] | str]:
    vectors = await work.vectors()
    return await asyncio.to_thread(shaped, vectors, body, normalize=normalize)


async def _scores(work: _Embedding, num_first: int) -> list[float]:
    """Of the first `num_first` prompts with the others."""
    vectors = await work.vectors()
    return await asyncio.to_thread(scores, vectors[:num_first], vectors[num_first:])
