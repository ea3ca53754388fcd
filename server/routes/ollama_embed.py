"""POST /api/embed and /api/embeddings: Ollama's names for what /v1/embeddings does."""

import time

import msgspec

from server.convert.pooling import input_prompts
from server.field_names import naming
from server.protocol.ollama import (
    EmbedRequest,
    EmbedResponse,
    SingleEmbedding,
    SingleEmbeddingRequest,
)
from server.protocol.pooling import EmbeddingRequest
from server.routes.pooling import Embeddings, with_items
from server.serving import Serving


async def embed_prompts(serving: Serving, body: EmbedRequest) -> list[list[int]]:
    """Without a text, the model is only loaded."""
    return await input_prompts(serving, _several(body)) if body.input else []


async def embed(serving: Serving, body: EmbedRequest, prompts: list[list[int]]) -> bytes:
    begun = time.perf_counter_ns()
    request = _several(body)
    shapes = await Embeddings(serving, request, prompts, "embd-").shapes(request, True) if prompts else ()
    whole = EmbedResponse(
        model=serving.model.id,
        embeddings=[],
        total_duration=time.perf_counter_ns() - begun,
        prompt_eval_count=sum(map(len, prompts)),
    )
    return await with_items(whole, shapes)


async def single_prompt(serving: Serving, body: SingleEmbeddingRequest) -> list[list[int]]:
    """Without a text, the model is only loaded."""
    if not body.prompt:
        return []
    with naming({"input": "prompt"}):
        return await input_prompts(serving, _single(body))


async def single_embedding(serving: Serving, body: SingleEmbeddingRequest, prompts: list[list[int]]) -> bytes:
    """The older route, whose embeddings have the length that the model gives them."""
    if not prompts:
        return msgspec.json.encode(SingleEmbedding([]))
    [vector] = await Embeddings(serving, _single(body), prompts, "embd-").vectors()
    return msgspec.json.encode(SingleEmbedding(vector))


def _several(body: EmbedRequest) -> EmbeddingRequest:
    return EmbeddingRequest(
        input=[*body.input] if isinstance(body.input, list) else body.input,
        dimensions=body.dimensions or None,
        timeout_s=body.timeout_s,
        truncate_prompt_tokens=None if body.truncate is False else -1,
        truncation_side="right",
    )


def _single(body: SingleEmbeddingRequest) -> EmbeddingRequest:
    return EmbeddingRequest(
        input=body.prompt, timeout_s=body.timeout_s, truncate_prompt_tokens=-1, truncation_side="right"
    )
