"""POST /api/embed and /api/embeddings: Ollama's names for what /v1/embeddings does."""

import time

from server.field_names import naming
from server.protocol.ollama import (
    EmbedRequest,
    EmbedResponse,
    SingleEmbedding,
    SingleEmbeddingRequest,
)
from server.protocol.pooling import EmbeddingRequest
from server.routes.pooling import embeddings
from server.serving import Serving


async def embed(serving: Serving, body: EmbedRequest) -> EmbedResponse:
    """Without a text, the model is only loaded."""
    begun = time.perf_counter_ns()
    vectors: list[list[float] | str] = []
    num_tokens = 0
    if body.input:
        request = EmbeddingRequest(
            input=[*body.input] if isinstance(body.input, list) else body.input,
            dimensions=body.dimensions or None,
            timeout_s=body.timeout_s,
            truncate_prompt_tokens=None if body.truncate is False else -1,
            truncation_side="right",
        )
        answer = await embeddings(serving, request)
        vectors, num_tokens = [one.embedding for one in answer.data], answer.usage.prompt_tokens
    return EmbedResponse(
        model=serving.model.id,
        embeddings=vectors,
        total_duration=time.perf_counter_ns() - begun,
        prompt_eval_count=num_tokens,
    )


async def single_embedding(serving: Serving, body: SingleEmbeddingRequest) -> SingleEmbedding:
    """The older route, whose embeddings have the length that the model gives them."""
    if not body.prompt:
        return SingleEmbedding([])
    request = EmbeddingRequest(
        input=body.prompt,
        normalize=False,
        timeout_s=body.timeout_s,
        truncate_prompt_tokens=-1,
        truncation_side="right",
    )
    with naming({"input": "prompt"}):
        answer = await embeddings(serving, request)
    return SingleEmbedding(answer.data[0].embedding)
