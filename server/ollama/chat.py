"""POST /api/chat and /api/generate."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

import msgspec
from fastapi import APIRouter
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
from server.generation import Generation
from server.logprobs import TokenLogprob, chat_logprobs, spelling
from server.metrics.records import current_phases
from server.ollama.requests import (
    FIELD_NAMES,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    chat_of,
    generate_chat_of,
    plain_prompt,
    served_otherwise,
    without_beginning,
)
from server.serving import Serving, ServingOf
from server.shortening import DROPPED, without_oldest
from server.sse import EventStream, until_disconnect
from server.structured import STRICT
from server.tools import tool_input

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


class AnswerEnd(TypedDict, total=False):
    """Durations are nanoseconds, whose three parts make up the total; counts are of tokens."""

    done_reason: str
    total_duration: int
    load_duration: int
    """Until the engine had the prompt; the model was there already."""
    prompt_eval_count: int
    prompt_eval_duration: int
    """Until the first token."""
    eval_count: int
    eval_duration: int


class OllamaAnswer(AnswerEnd):
    """In one piece, or a line of a stream, of which the last has the end."""

    model: str
    created_at: str
    done: bool
    logprobs: NotRequired[list[TokenLogprob]]


class OllamaChatAnswer(OllamaAnswer):
    message: OllamaAnswerMessage


@STRICT
class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]
    """Token ids of prompt and answer, to be continued."""


Write = Callable[[Answer, int], dict[str, Any]]
"""The fields of some more, or all, of an answer, of which so many tool calls came before."""


Started = tuple[Generation, Answers, dict[str, str]]
"""With headers that say what was cut off."""


@router.post("/api/chat", response_model=OllamaChatAnswer, responses=streamed(OllamaChatAnswer, LINES))
async def chat(body: OllamaChatRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a chat."""
    if not body.messages:
        return _loaded(serving, _message)
    started = await request.prepare(lambda: _start_chat(body, serving))
    return await _respond(started, body, request, _message)


@router.post("/api/generate", response_model=OllamaGenerateAnswer, responses=streamed(OllamaGenerateAnswer, LINES))
async def generate(body: OllamaGenerateRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a prompt, or write what is missing in a text."""
    if not body.prompt and not body.suffix:
        return _loaded(serving, _response)
    started = await request.prepare(lambda: _start_generate(body, serving))
    return await _respond(started, body, request, _response, with_context=not (body.raw or body.suffix))


async def _start_chat(body: OllamaChatRequest, serving: Serving) -> Started:
    try:
        return *await start_chat(serving, chat_of(body, serving), "chat-"), {}
    except ContextLengthExceeded:
        chat = chat_of(body, serving)
        shorter = None if body.truncate is False else await without_oldest(chat, serving)
        if shorter is None:
            raise
        num_dropped = len(chat.messages) - len(shorter.messages)
        return *await start_chat(serving, shorter, "chat-"), {DROPPED: str(num_dropped)}


async def _start_generate(body: OllamaGenerateRequest, serving: Serving) -> Started:
    try:
        return *await _generation(body, serving, is_cut=False), {}
    except ContextLengthExceeded:
        if body.truncate is False or body.suffix:
            raise
        generation, answers = await _generation(body, serving, is_cut=True)
        return generation, answers, {"x-octavo-prompt-cut-to": str(generation.num_prompt_tokens)}


async def _generation(body: OllamaGenerateRequest, serving: Serving, *, is_cut: bool) -> tuple[Generation, Answers]:
    if not body.raw and not body.suffix:
        chat = generate_chat_of(body, serving)
        return await start_chat(serving, await without_beginning(chat, serving) if is_cut else chat, "gen-")
    prompt = await plain_prompt(body, serving, is_cut=is_cut)
    generation = Generation(serving, [prompt], id_prefix="gen-", field_names=FIELD_NAMES, timeout=body.timeout_s)
    return generation, Answers(None)


async def _respond(
    started: Started, body: OllamaRequest, request: ParsedRequest, write: Write, *, with_context: bool = False
) -> Response:
    generation, answers, headers = started
    params, limit = generation.prompts[0].params, generation.serving.model.max_model_len
    request.ignored_fields += served_otherwise(body, params, limit) + generation.passed_over
    writer = LineWriter(generation, answers, write, with_context=with_context)
    if body.stream is not False:
        return LineStream(generation.run(), writer, headers)
    whole = writer.whole(await until_disconnect(request.receive, generation.whole()))
    return Response(whole, headers=headers, media_type="application/json")


class LineStream(EventStream):
    """A JSON object in each line. Clients know no comments, so nothing keeps an idle connection alive."""

    media_type = LINES


class LineWriter:
    """One answer: an object for each piece and one that says how it ended, or all in one object."""

    def __init__(self, generation: Generation, answers: Answers, write: Write, *, with_context: bool) -> None:
        self.generation = generation
        self.answers = answers
        self.write = write
        self.tokenizer = generation.serving.engine.tokenizer
        self.spell = spelling(self.tokenizer, False)
        self.context = list(generation.prompts[0].token_ids) if with_context else None
        self.calls = Answer()
        """Tool calls so far; the last may still grow."""
        self.num_calls_sent = 0

    def whole(self, outputs: list[CompletionOutput]) -> bytes:
        [output] = outputs
        if self.context is not None:
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
        if self.context is not None:
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
        fields = {**_head(self.generation.serving), **self.write(answer, self.num_calls_sent)}
        if logprobs:
            fields["logprobs"] = chat_logprobs(self.spell, self.tokenizer, logprobs)["content"]
        return msgspec.json.encode(fields | ending)

    def _ending(self) -> dict[str, Any]:
        [latest] = self.generation.latest
        assert latest is not None, self.generation.id
        context = {} if self.context is None else {"context": self.context}
        phases = current_phases()
        seconds = (phases.prepare, phases.queue + phases.prefill, phases.decode)
        load, prompt_eval, evaluation = (int(one * 1e9) for one in seconds)
        counts: AnswerEnd = {
            "done_reason": latest.finish_reason or "",
            "total_duration": load + prompt_eval + evaluation,
            "load_duration": load,
            "prompt_eval_count": latest.num_prompt_tokens,
            "prompt_eval_duration": prompt_eval,
            "eval_count": latest.num_output_tokens,
            "eval_duration": evaluation,
        }
        return {"done": True, **context, **counts}


def _loaded(serving: Serving, write: Write) -> Response:
    """The answer to a request that only wants the model to be loaded."""
    return JSONResponse({**_head(serving), **write(Answer(), 0), "done": True, "done_reason": "load"})


def _head(serving: Serving) -> dict[str, Any]:
    """What every object begins with."""
    return {"model": serving.model.id, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _message(answer: Answer, num_calls_before: int) -> dict[str, Any]:
    message: OllamaAnswerMessage = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["thinking"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"index": index, "name": call.name, "arguments": tool_input(call.arguments)}}
            for index, call in enumerate(answer.tool_calls, num_calls_before)
        ]
    return {"message": message}


def _response(answer: Answer, _: int) -> dict[str, Any]:
    return {"response": answer.content, **({"thinking": answer.reasoning} if answer.reasoning else {})}
