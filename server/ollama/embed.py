"""POST /api/embed and /api/embeddings: Ollama's names for what /v1/embeddings does."""

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from server.bodies import BodyRoute, ParsedRequest
from server.errors import OllamaError, error_statuses
from server.ollama.requests import OllamaBody
from server.openai.base import Timeout
from server.openai.embeddings import Embedder, PoolingFields, TextToEmbed, prompts_of
from server.serving import Serving, ServingOf
from server.sse import until_disconnect
from server.structured import STRICT
from server.vectors import filled, shaped

router = APIRouter(route_class=BodyRoute, responses=error_statuses(form=OllamaError))


class EmbeddingBody(OllamaBody):
    timeout_s: Timeout | None = None
    """Seconds until the request fails with 408; the server may have a bound of its own."""
    keep_alive: Any = None
    options: Any = None


class EmbedRequest(EmbeddingBody):
    input: str | list[str] | None = None
    """Without any, nothing is embedded."""
    truncate: bool | None = None
    """False: refuse what the context does not hold. Else the end of each text is cut off."""
    dimensions: Annotated[int, Field(ge=0)] | None = None
    """Keep only this many numbers of each embedding, the first; they are scaled to length 1 again. 0 keeps all."""


class SingleEmbeddingRequest(EmbeddingBody):
    prompt: str | None = None
    """Without one, nothing is embedded. What the context does not hold is cut off."""


@STRICT
class EmbedResponse(TypedDict):
    """Durations are nanoseconds; the count is of tokens."""

    model: str
    embeddings: list[list[float]]
    """Scaled to (Euclidean) length 1."""
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class SingleEmbedding(TypedDict):
    embedding: list[float]


@router.post("/api/embed", response_model=EmbedResponse)
async def embed(body: EmbedRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Embed texts; without any, the model is only loaded."""
    begun = time.perf_counter_ns()
    texts = [body.input] if isinstance(body.input, str) and body.input else body.input or []
    vectors, num_tokens = await _vectors(body, request, serving, "input", texts, may_cut=body.truncate is not False)
    shapes = shaped(vectors, body.dimensions or None, normalize=True, as_base64=False) if vectors else ()
    head = {
        "model": serving.model.id,
        "total_duration": time.perf_counter_ns() - begun,
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return Response(await filled(head, "embeddings", shapes), media_type="application/json")


@router.post("/api/embeddings", response_model=SingleEmbedding)
async def single_embedding(body: SingleEmbeddingRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Embed one text, in the older form: the embedding has the length that the model gives it."""
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await _vectors(body, request, serving, "prompt", texts)
    return Response(msgspec.json.encode({"embedding": vectors[0] if vectors else []}), media_type="application/json")


async def _vectors(
    body: EmbeddingBody, request: ParsedRequest, serving: Serving, field: str, texts: list[str], *, may_cut: bool = True
) -> tuple[list[list[float]], int]:
    """As the model gives them, and the number of tokens."""
    if not texts:
        return [], 0
    fields = PoolingFields(
        timeout_s=body.timeout_s, truncate_prompt_tokens=-1 if may_cut else None, truncation_side="right"
    )
    prompts = await request.prepare(lambda: prompts_of(serving, fields, [TextToEmbed(one, field) for one in texts]))
    vectors = await until_disconnect(request.receive, Embedder(serving, fields, prompts, "embd-").vectors())
    return vectors, sum(map(len, prompts))
