"""llama.cpp's own routes: POST /completion and /infill, GET /props and /slots."""

from contextlib import aclosing
from typing import Any, NotRequired

import msgspec
from fastapi import APIRouter
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import Unavailable
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server import version
from server.bodies import BodyRoute, ParsedRequest
from server.documented import streamed
from server.errors import error_statuses, openai_error
from server.generation import Generation
from server.llama_cpp.requests import (
    InfillRequest,
    NativeCompletionRequest,
    NativeRequest,
    native_generation,
    passed_over,
    settings,
)
from server.logprobs import LOWEST, spelling
from server.metrics.records import current_phases
from server.sampling import sampling_params
from server.serving import Serving, ServingOf
from server.sse import EventStream, event, until_disconnect

router = APIRouter(route_class=BodyRoute, responses=error_statuses())


class NativeTopLogprob(TypedDict):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class NativeLogprob(NativeTopLogprob):
    top_logprobs: list[NativeTopLogprob]


class Timings(TypedDict):
    cache_n: int
    prompt_n: int
    """Tokens of the prompt that were computed."""
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class NativeChunk(TypedDict):
    """A piece of an answer; with `response_fields`, those fields alone."""

    index: NotRequired[int]
    content: NotRequired[str]
    tokens: NotRequired[list[int]]
    stop: NotRequired[bool]
    id_slot: NotRequired[int]
    tokens_predicted: NotRequired[int]
    tokens_evaluated: NotRequired[int]
    completion_probabilities: NotRequired[list[NativeLogprob]]


class NativeCompletion(NativeChunk):
    """A whole answer, or the last chunk of one, without its text; with `response_fields`, those fields alone."""

    model: NotRequired[str]
    generation_settings: NotRequired[dict[str, Any]]
    prompt: NotRequired[str]
    has_new_line: NotRequired[bool]
    truncated: NotRequired[bool]
    stop_type: NotRequired[str]
    """eos, word or limit."""
    stopping_word: NotRequired[str]
    tokens_cached: NotRequired[int]
    timings: NotRequired[Timings]


class Props(TypedDict):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    """The name alone: where the file is, is nobody's business."""
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class Slot(TypedDict):
    """As many as requests of one step; which request runs in which is not told apart."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool


Answer = NativeCompletion | list[NativeCompletion]


@router.post("/completion", response_model=Answer, responses=streamed(NativeCompletion))
async def completion(body: NativeCompletionRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Continue prompts, in llama.cpp's form."""
    return await _respond(body, request, serving)


@router.post("/infill", response_model=Answer, responses=streamed(NativeCompletion))
async def infill(body: InfillRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Write what is missing in a text, in llama.cpp's form."""
    return await _respond(body, request, serving)


@router.get("/props", response_model=Props)
async def props(serving: ServingOf) -> Props:
    """What is served, in llama.cpp's form."""
    engine = serving.engine
    params = sampling_params({"max_tokens": None}, engine.default_sampling)
    limit = engine.info.max_model_len
    tokens = engine.tokenizer.special_tokens
    return {
        "default_generation_settings": {"n_ctx": limit, "params": settings(params, limit)},
        "total_slots": serving.config.max_num_seqs,
        "model_alias": serving.model.id,
        "model_path": serving.model.id,
        "chat_template": engine.chat_template or "",
        "bos_token": tokens.get("bos_token") or "",
        "eos_token": tokens.get("eos_token") or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"octavo-{version()}",
        "is_sleeping": False,
    }


@router.get("/slots")
async def slots(serving: ServingOf, fail_on_no_slot: str = "") -> list[Slot]:
    """One slot for each request of a step. With `fail_on_no_slot`, a 503 where every slot is taken."""
    total, running = serving.config.max_num_seqs, serving.engine.stats().num_running
    if fail_on_no_slot and running >= total:
        raise Unavailable("no slot is free", retry_after=1)
    limit = serving.engine.info.max_model_len
    return [
        {"id": index, "n_ctx": limit, "is_processing": index < running, "speculative": False} for index in range(total)
    ]


async def _respond(body: NativeRequest, request: ParsedRequest, serving: Serving) -> Response:
    generation = await request.prepare(lambda: native_generation(serving, body))
    request.ignored_fields += passed_over(body, generation.prompts[0].params)
    writer = NativeWriter(generation, body, await _prompts(generation, body))
    if body.stream:
        return EventStream(generation.run(), writer, keep_alive=serving.config.sse_keep_alive_interval)
    return Response(await until_disconnect(request.receive, writer.whole()), media_type="application/json")


async def _prompts(generation: Generation, body: NativeRequest) -> list[str]:
    """As the model reads them; empty where the answer does not have them."""
    if body.response_fields and "prompt" not in body.response_fields:
        return [""] * len(generation.prompts)
    engine = generation.serving.engine
    return [await engine.decode(prompt.token_ids, skip_special_tokens=False) for prompt in generation.prompts]


class NativeWriter:
    """Writes the answers of one generation: whole, or event by event."""

    def __init__(self, generation: Generation, body: NativeRequest, prompts: list[str]) -> None:
        self.generation = generation
        self.body = body
        self.prompts = prompts
        self.tokenizer = generation.serving.engine.tokenizer
        self.spell = spelling(self.tokenizer, False)
        self.with_new_line: set[int] = set()
        """Choices whose text has one."""

    async def whole(self) -> bytes:
        """One object, or a list where there are several answers."""
        outputs = [CompletionOutput(index) for index in range(len(self.generation.latest))]
        async with aclosing(self.generation.run()) as batches:
            async for batch in batches:
                for index, output in batch:
                    self._note(index, output)
                    outputs[index].extend(output)
        answers = [self._answer(output.index, output, with_text=True) for output in outputs]
        return msgspec.json.encode(answers[0] if len(answers) == 1 else answers)

    def events(self, batch: OutputBatch) -> bytes:
        events = b""
        for index, output in batch:
            self._note(index, output)
            if output.text or output.token_ids:
                chunk = self._chunk(index, output, with_tokens=True)
                events += event(msgspec.json.encode(self._picked(chunk)))
            if output.finish_reason is not None:
                events += event(msgspec.json.encode(self._answer(index, output, with_text=False)))
        return events

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))

    def _note(self, index: int, output: RequestOutput) -> None:
        self.generation.latest[index] = output
        if "\n" in output.text:
            self.with_new_line.add(index)

    def _chunk(self, index: int, output: CompletionOutput | RequestOutput, *, with_tokens: bool) -> NativeChunk:
        latest = self.generation.latest[index]
        assert latest is not None, self.generation.id
        chunk: NativeChunk = {
            "index": index,
            "content": output.text,
            "tokens": output.token_ids if with_tokens else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": latest.num_output_tokens,
            "tokens_evaluated": latest.num_prompt_tokens,
        }
        if output.logprobs:
            chunk["completion_probabilities"] = [self._logprobs(one) for one in output.logprobs]
        return chunk

    def _answer(self, index: int, output: CompletionOutput | RequestOutput, *, with_text: bool) -> Any:
        latest, prompt = self.generation.latest[index], self.generation.prompt_of(index)
        assert latest is not None, self.generation.id
        chunk = self._chunk(index, output, with_tokens=bool(self.body.return_tokens))
        if not with_text:
            chunk |= {"content": "", "tokens": []}
            chunk.pop("completion_probabilities", None)
        stopping_word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        serving = self.generation.serving
        answer: NativeCompletion = {
            **chunk,
            "stop": True,
            "model": serving.model.id,
            "generation_settings": settings(prompt.params, serving.engine.info.max_model_len),
            "prompt": self.prompts[index // self.generation.n],
            "has_new_line": index in self.with_new_line,
            "truncated": False,
            "stop_type": "word" if stopping_word else "eos" if output.finish_reason == "stop" else "limit",
            "stopping_word": stopping_word,
            "tokens_cached": latest.num_cached_tokens,
            "timings": _timings(latest),
        }
        return self._picked(answer)

    def _logprobs(self, position: TokenLogprobs) -> NativeLogprob:
        top = [self._logprob(*one) for one in position.top]
        return {**self._logprob(position.token_id, position.logprob), "top_logprobs": top}

    def _logprob(self, token_id: int, logprob: float) -> NativeTopLogprob:
        raw = list(self.tokenizer.token_bytes(token_id))
        return {"id": token_id, "token": self.spell(token_id), "bytes": raw, "logprob": max(LOWEST, logprob)}

    def _picked(self, answer: NativeChunk) -> Any:
        """The answer, or of it the fields that the request asks for by name."""
        if not self.body.response_fields:
            return answer
        found = {path: _at(answer, path) for path in self.body.response_fields}
        return {path: value for path, value in found.items() if value is not _MISSING}


_MISSING = object()


def _at(value: Any, path: str) -> Any:
    for name in path.split("/"):
        value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _timings(latest: RequestOutput) -> Timings:
    cached, predicted = latest.num_cached_tokens, latest.num_output_tokens
    computed = latest.num_prompt_tokens - cached
    _, queue, prefill, decode = current_phases()
    prompt_ms, predicted_ms = (queue + prefill) * 1e3, decode * 1e3
    return {
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, computed),
        "prompt_per_second": computed / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(1, predicted),
        "predicted_per_second": predicted / predicted_ms * 1e3 if predicted_ms else 0.0,
    }
