"""What the model does in Ollama's API: POST /api/chat and /api/generate, /api/embed and /api/embeddings."""

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired, Required

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from configs.errors import ContextLengthExceeded
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.answers.delta import Answer, DeltaMessage, ToolCall
from server.bodies import BodyRoute, ParsedRequest
from server.chat import Answers, start_chat
from server.documented import LINES, streamed
from server.errors import OllamaError, error_statuses, ollama_error
from server.generation import Generation, GenerationOptions
from server.logprobs import TokenLogprob, chat_logprobs, spelling
from server.metrics.records import current_phases
from server.ollama.requests import (
    FIELD_NAMES,
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    chat_of,
    plain_prompt,
    without_beginning,
)
from server.openai.base import Timeout
from server.openai.embeddings import Embedder, PoolingFields, TextToEmbed, prompts_of
from server.serving import Serving, ServingOf
from server.shortening import start_shortened
from server.sse import EventStream, until_disconnect
from server.structured import STRICT
from server.tools import tool_input
from server.vectors import filled, shaped

router = APIRouter(route_class=BodyRoute, responses=error_statuses(form=OllamaError))


class OllamaFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(TypedDict):
    id: str
    function: OllamaFunction


class OllamaAnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class OllamaAnswer(TypedDict, total=False):
    """In one piece, or a line of a stream, of which the last has what is not in every line. Durations are nanoseconds,
    whose three parts make up the total; counts are of tokens."""

    model: Required[str]
    created_at: Required[str]
    done: Required[bool]
    logprobs: list[TokenLogprob]
    done_reason: str
    total_duration: int
    load_duration: int
    """Until the engine had the prompt; the model was there already."""
    prompt_eval_count: int
    prompt_eval_duration: int
    """Until the first token."""
    eval_count: int
    eval_duration: int


class OllamaChatAnswer(OllamaAnswer):
    message: OllamaAnswerMessage


@STRICT
class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]
    """Token ids of prompt and answer, to be continued."""


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


@router.post("/api/chat", response_model=OllamaChatAnswer, responses=streamed(OllamaChatAnswer, LINES))
async def chat(body: OllamaChatRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a chat."""
    return await _respond(body, request, serving, only_load=not body.messages)


@router.post("/api/generate", response_model=OllamaGenerateAnswer, responses=streamed(OllamaGenerateAnswer, LINES))
async def generate(body: OllamaGenerateRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a prompt, or write what is missing in a text."""
    return await _respond(body, request, serving, only_load=not body.prompt and not body.suffix)


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


Body = OllamaChatRequest | OllamaGenerateRequest


async def _respond(body: Body, request: ParsedRequest, serving: Serving, *, only_load: bool) -> Response:
    if only_load:
        return JSONResponse({**_fields(body, serving, Answer()), "done": True, "done_reason": "load"})
    generation, answers, headers = await request.prepare(lambda: _start(body, serving))
    options = body.options or OllamaOptions()
    ignored = options.served_otherwise(generation.prompts[0].params)
    if (options.num_ctx or 0) > serving.model.max_model_len:
        ignored.append("num_ctx")
    request.ignored_fields += [f"options.{name}" for name in ignored] + generation.passed_over
    writer = LineWriter(generation, answers, body)
    if body.stream is not False:
        return LineStream(generation.run(), writer, headers)
    whole = writer.whole(await until_disconnect(request.receive, generation.whole()))
    return Response(whole, headers=headers, media_type="application/json")


async def _start(body: Body, serving: Serving) -> tuple[Generation, Answers, dict[str, str]]:
    """With headers that say what was cut off."""
    may_cut = body.truncate is not False
    if isinstance(body, OllamaChatRequest):
        return await start_shortened(serving, chat_of(body, serving), "chat-", may_drop=may_cut)
    try:
        return *await _generation(body, serving, is_cut=False), {}
    except ContextLengthExceeded:
        if not may_cut or body.suffix:
            raise
    generation, answers = await _generation(body, serving, is_cut=True)
    return generation, answers, {"x-octavo-prompt-cut-to": str(generation.num_prompt_tokens)}


async def _generation(body: OllamaGenerateRequest, serving: Serving, *, is_cut: bool) -> tuple[Generation, Answers]:
    if body.has_template:
        chat = chat_of(body, serving)
        return await start_chat(serving, await without_beginning(chat, serving) if is_cut else chat, "gen-")
    prompt = await plain_prompt(body, serving, is_cut=is_cut)
    options = GenerationOptions(field_names=FIELD_NAMES, timeout=body.timeout_s)
    return Generation(serving, [prompt], options, id_prefix="gen-"), Answers(None)


class LineStream(EventStream):
    """A JSON object in each line. Clients know no comments, so nothing keeps an idle connection alive."""

    media_type = LINES


class LineWriter:
    """One answer: an object for each piece and one that says how it ended, or all in one object."""

    def __init__(self, generation: Generation, answers: Answers, body: Body) -> None:
        self.generation = generation
        self.answers = answers
        self.body = body
        self.tokenizer = generation.serving.engine.tokenizer
        self.spell = spelling(self.tokenizer, False)
        self.context = [*generation.prompts[0].token_ids]
        """Of prompt and answer."""
        self.calls = Answer()
        """Tool calls so far; the last may still grow."""
        self.num_calls_sent = 0

    def whole(self, outputs: list[CompletionOutput]) -> bytes:
        [output] = outputs
        self.context += output.token_ids
        return self._object(self.answers.whole(output), output.logprobs, self._ending())

    def events(self, batch: OutputBatch) -> bytes:
        return b"".join([self._line(output) for _, output in batch])

    def end(self) -> bytes:
        return self._object(Answer(), None, self._ending()) + b"\n"

    def error(self, error: Exception) -> bytes:
        return ollama_error(error) + b"\n"

    def _line(self, output: RequestOutput) -> bytes:
        self.generation.latest[0] = output
        self.context += output.token_ids
        delta = self.answers.delta(0, output)
        calls = self._finished_calls(delta, is_last=output.finish_reason is not None)
        if not (delta.content or delta.reasoning or calls or output.logprobs):
            return b""
        line = self._object(Answer(delta.reasoning, delta.content, calls), output.logprobs, {"done": False})
        self.num_calls_sent += len(calls)
        return line + b"\n"

    def _finished_calls(self, delta: DeltaMessage, *, is_last: bool) -> list[ToolCall]:
        """Calls leave whole, when the next one begins or the answer ends."""
        if delta.tool_calls:
            self.calls.add(DeltaMessage(tool_calls=delta.tool_calls))
        calls = self.calls.tool_calls[self.num_calls_sent :]
        return calls if is_last else calls[:-1]

    def _object(self, answer: Answer, logprobs: list[TokenLogprobs] | None, ending: dict[str, Any]) -> bytes:
        fields = _fields(self.body, self.generation.serving, answer, self.num_calls_sent)
        if logprobs:
            fields["logprobs"] = chat_logprobs(self.spell, self.tokenizer, logprobs)["content"]
        return msgspec.json.encode(fields | ending)

    def _ending(self) -> dict[str, Any]:
        [latest] = self.generation.latest
        assert latest is not None, self.generation.id
        with_context = isinstance(self.body, OllamaGenerateRequest) and self.body.has_template
        phases = current_phases()
        seconds = (phases.prepare, phases.queue + phases.prefill, phases.decode)
        load, prompt_eval, evaluation = (int(one * 1e9) for one in seconds)
        return {
            "done": True,
            **({"context": self.context} if with_context else {}),
            "done_reason": latest.finish_reason or "",
            "total_duration": load + prompt_eval + evaluation,
            "load_duration": load,
            "prompt_eval_count": latest.num_prompt_tokens,
            "prompt_eval_duration": prompt_eval,
            "eval_count": latest.num_output_tokens,
            "eval_duration": evaluation,
        }


def _fields(body: Body, serving: Serving, answer: Answer, num_calls_before: int = 0) -> dict[str, Any]:
    """What every object begins with, and some more, or all, of an answer, of which so many tool calls came before."""
    head = {"model": serving.model.id, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    thinking = {"thinking": answer.reasoning} if answer.reasoning else {}
    if isinstance(body, OllamaGenerateRequest):
        return {**head, "response": answer.content, **thinking}
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, **thinking}
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"index": index, "name": call.name, "arguments": tool_input(call.arguments)}}
            for index, call in enumerate(answer.tool_calls, num_calls_before)
        ]
    return {**head, "message": message}
