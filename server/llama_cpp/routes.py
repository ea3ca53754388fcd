"""llama.cpp's own routes: POST /completion and /infill, GET /props and /slots."""

from collections.abc import Mapping
from typing import Any

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
from server.llama_cpp.requests import InfillRequest, NativeCompletionRequest, native_generation, settings
from server.logprobs import LOWEST, TopLogprob, spelling
from server.metrics.records import current_phases
from server.sampling import sampling_params
from server.serving import Serving, ServingOf
from server.sse import EventStream, EventWriter, event, until_disconnect

router = APIRouter(route_class=BodyRoute, tags=["llama.cpp"], responses=error_statuses())


class NativeTopLogprob(TopLogprob):
    id: int


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


class NativeCompletion(TypedDict, total=False):
    """A whole answer, or a chunk of one: what stands behind the tokens' probabilities is in the last chunk alone, which
    has no text. With `response_fields`, those fields alone."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[NativeLogprob]
    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: str
    """eos, word or limit."""
    stopping_word: str
    tokens_cached: int
    timings: Timings


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


@router.get("/props")
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


Body = NativeCompletionRequest | InfillRequest


async def _respond(body: Body, request: ParsedRequest, serving: Serving) -> Response:
    generation = await request.prepare(lambda: native_generation(serving, body))
    request.ignored_fields += body.served_otherwise(generation.prompts[0].params)
    prompts = [""] * len(generation.prompts)
    if not body.response_fields or "prompt" in body.response_fields:
        token_ids = [prompt.token_ids for prompt in generation.prompts]
        prompts = [await serving.engine.decode(one, skip_special_tokens=False) for one in token_ids]
    writer = NativeWriter(generation, body, prompts)
    if body.stream:
        return EventStream(generation.run(), writer, keep_alive=serving.config.sse_keep_alive_interval)
    whole = writer.whole(await until_disconnect(request.receive, generation.whole()))
    return Response(whole, media_type="application/json")


class NativeWriter(EventWriter):
    """Writes the answers of one generation, whole or event by event."""

    def __init__(self, generation: Generation, body: Body, prompts: list[str]) -> None:
        self.generation = generation
        self.body = body
        self.prompts = prompts
        """As the model reads them; empty where the answer does not have them."""
        self.tokenizer = generation.serving.engine.tokenizer
        self.spell = spelling(self.tokenizer)
        self.with_new_line: set[int] = set()
        """Choices whose streamed text has one."""

    def whole(self, outputs: list[CompletionOutput]) -> bytes:
        """JSON of one object, or of a list where there are several answers."""
        answers = []
        for output, latest in zip(outputs, self.generation.latest, strict=True):
            assert latest is not None, self.generation.id
            parts = {"text": output.text, "token_ids": output.token_ids, "logprobs": output.logprobs}
            answers.append(self._picked(self._answer(output.index, msgspec.structs.replace(latest, **parts))))
        return msgspec.json.encode(answers[0] if len(answers) == 1 else answers)

    def events(self, batch: OutputBatch) -> bytes:
        pieces = []
        for index, output in batch:
            self.generation.latest[index] = output
            if "\n" in output.text:
                self.with_new_line.add(index)
            if output.text or output.token_ids:
                pieces.append(self._chunk(index, output))
            if output.finish_reason is not None:
                empty = msgspec.structs.replace(output, text="", token_ids=[], logprobs=None)
                pieces.append(self._answer(index, empty))
        return b"".join([event(msgspec.json.encode(self._picked(piece))) for piece in pieces])

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))

    def _chunk(self, index: int, output: RequestOutput) -> NativeCompletion:
        chunk: NativeCompletion = {
            "index": index,
            "content": output.text,
            "tokens": output.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": output.num_output_tokens,
            "tokens_evaluated": output.num_prompt_tokens,
        }
        if output.logprobs:
            chunk["completion_probabilities"] = [self._logprobs(one) for one in output.logprobs]
        return chunk

    def _answer(self, index: int, output: RequestOutput) -> NativeCompletion:
        serving, params = self.generation.serving, self.generation.prompt_of(index).params
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        return {
            **self._chunk(index, output),
            "tokens": output.token_ids if self.body.return_tokens else [],
            "stop": True,
            "model": serving.model.id,
            "generation_settings": settings(params, serving.engine.info.max_model_len),
            "prompt": self.prompts[index // self.generation.n],
            "has_new_line": "\n" in output.text or index in self.with_new_line,
            "truncated": False,
            "stop_type": "word" if word else "eos" if output.finish_reason == "stop" else "limit",
            "stopping_word": word,
            "tokens_cached": output.num_cached_tokens,
            "timings": _timings(output),
        }

    def _logprobs(self, position: TokenLogprobs) -> NativeLogprob:
        top = [self._logprob(*one) for one in position.top]
        return {**self._logprob(position.token_id, position.logprob), "top_logprobs": top}

    def _logprob(self, token_id: int, logprob: float) -> NativeTopLogprob:
        raw = list(self.tokenizer.token_bytes(token_id))
        return {"id": token_id, "token": self.spell(token_id), "bytes": raw, "logprob": max(LOWEST, logprob)}

    def _picked(self, answer: NativeCompletion) -> Mapping[str, object]:
        """The answer, or those of its fields that the request asks for by name."""
        if not self.body.response_fields:
            return answer
        found = {path: _at(answer, path) for path in self.body.response_fields}
        return {path: value for path, value in found.items() if value is not None}


def _at(value: Any, path: str) -> Any:
    """The field at the path; None where there is none."""
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _timings(latest: RequestOutput) -> Timings:
    phases, output = current_phases(), latest.num_output_tokens
    computed, seconds = latest.num_prompt_tokens - latest.num_cached_tokens, phases.queue + phases.prefill
    return {
        "cache_n": latest.num_cached_tokens,
        "prompt_n": computed,
        "prompt_ms": seconds * 1e3,
        "prompt_per_token_ms": seconds * 1e3 / max(1, computed),
        "prompt_per_second": computed / seconds if seconds else 0.0,
        "predicted_n": output,
        "predicted_ms": phases.decode * 1e3,
        "predicted_per_token_ms": phases.decode * 1e3 / max(1, output),
        "predicted_per_second": output / phases.decode if phases.decode else 0.0,
    }
