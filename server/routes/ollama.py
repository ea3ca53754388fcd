"""POST /api/chat and /api/generate: Ollama's API."""

import time
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import ContextLengthExceeded
from configs.settings import ServerConfig
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.answers.delta import Answer, DeltaMessage
from server.chat import Answers, start_chat
from server.convert.ollama import (
    FIELD_NAMES,
    chat_of,
    end_of,
    generate_chat_of,
    ignored_fields,
    plain_prompt,
    sampling_of,
    without_beginning,
)
from server.convert.shortening import DROPPED, without_oldest
from server.convert.tool_input import tool_input
from server.disconnect import until_disconnect
from server.errors import ollama_error
from server.field_names import naming
from server.generation import Generation, Prompt
from server.logprobs import chat_logprobs, spelling
from server.parsing import BodyParser, ignored_header
from server.protocol.ollama import (
    Metrics,
    OllamaChatRequest,
    OllamaFunction,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
    OllamaToolCall,
)
from server.sampling import fitted, sampling_params
from server.serving import Serving, serving_of
from server.sse import EventStream

Body = TypeVar("Body", bound=OllamaRequest)
Fields = Callable[[Answer], dict[str, Any]]
"""How a route writes some more, or all, of an answer."""


class OllamaRoute(Generic[Body]):
    """Called with a request; raises `RequestError`."""

    body_type: type[Body]

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(self.body_type, config)

    async def __call__(self, request: Request) -> Response:
        watch = Stopwatch()
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)
        if self.is_empty(body):
            loaded = {**head(serving), **self.fields(Answer()), "done": True, "done_reason": "load"}
            headers = ignored_header(parsed.ignored_fields)
            return Response(msgspec.json.encode(loaded), headers=headers, media_type="application/json")
        generation, answers, headers = await serving.preparation.prepare(request, lambda: self.started(serving, body))
        watch.prepared()
        ignored = ignored_fields(body, generation.prompts[0].params, serving.model.max_model_len)
        headers |= ignored_header(parsed.ignored_fields + ignored + generation.passed_over)
        writer = LineWriter(generation, answers, self.fields, watch, with_context=self.gives_context(body))
        if body.stream is not False:
            return LineStream(generation.run(), writer, headers)
        whole = await until_disconnect(request.receive, writer.whole())
        return Response(whole, headers=headers, media_type="application/json")

    async def started(self, serving: Serving, body: Body) -> tuple[Generation, Answers, dict[str, str]]:
        """What `start`, or `start_shorter`, gives, with headers of the answer."""
        try:
            return *await self.start(serving, body), {}
        except ContextLengthExceeded:
            if body.truncate is False or (shorter := await self.start_shorter(serving, body)) is None:
                raise
            return shorter

    def is_empty(self, body: Body) -> bool:
        """Whether the request only wants the model to be loaded."""
        raise NotImplementedError

    def gives_context(self, body: Body) -> bool:
        return False

    async def start(self, serving: Serving, body: Body) -> tuple[Generation, Answers]:
        raise NotImplementedError

    async def start_shorter(self, serving: Serving, body: Body) -> tuple[Generation, Answers, dict[str, str]] | None:
        """As `start`, less what the context does not hold, with headers that say so; None where that cannot be."""
        raise NotImplementedError

    def fields(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError


class OllamaChatRoute(OllamaRoute[OllamaChatRequest]):
    body_type = OllamaChatRequest

    def is_empty(self, body: OllamaChatRequest) -> bool:
        return not body.messages

    async def start(self, serving: Serving, body: OllamaChatRequest) -> tuple[Generation, Answers]:
        return await start_chat(serving, chat_of(body, serving), "chat-")

    async def start_shorter(
        self, serving: Serving, body: OllamaChatRequest
    ) -> tuple[Generation, Answers, dict[str, str]] | None:
        chat = chat_of(body, serving)
        shorter = await without_oldest(chat, serving)
        if shorter is None:
            return None
        num_dropped = len(chat.messages) - len(shorter.messages)
        return *await start_chat(serving, shorter, "chat-"), {DROPPED: str(num_dropped)}

    def fields(self, answer: Answer) -> dict[str, Any]:
        calls = [
            OllamaToolCall(call.id, OllamaFunction(index, call.name, tool_input(call.arguments)))
            for index, call in enumerate(answer.tool_calls)
        ]
        message = OllamaMessage(
            content=answer.content, thinking=answer.reasoning or UNSET, tool_calls=calls if calls else UNSET
        )
        return {"message": message}


class OllamaGenerateRoute(OllamaRoute[OllamaGenerateRequest]):
    body_type = OllamaGenerateRequest

    def is_empty(self, body: OllamaGenerateRequest) -> bool:
        return not body.prompt and not body.suffix

    def gives_context(self, body: OllamaGenerateRequest) -> bool:
        return not (body.raw or body.suffix)

    async def start(self, serving: Serving, body: OllamaGenerateRequest) -> tuple[Generation, Answers]:
        if self.gives_context(body):
            return await start_chat(serving, generate_chat_of(body, serving), "gen-")
        return self._start_plain(serving, body, await plain_prompt(body, serving, must_fit=True))

    async def start_shorter(
        self, serving: Serving, body: OllamaGenerateRequest
    ) -> tuple[Generation, Answers, dict[str, str]] | None:
        if body.suffix:
            return None
        if self.gives_context(body):
            chat = generate_chat_of(body, serving)
            shorter = await without_beginning(body, chat, serving)
            if shorter is None:
                return None
            generation, answers = await start_chat(serving, shorter, "gen-")
        else:
            token_ids = end_of(await plain_prompt(body, serving, must_fit=False), serving)
            generation, answers = self._start_plain(serving, body, token_ids)
        return generation, answers, {"x-octavo-prompt-cut-to": str(generation.num_prompt_tokens)}

    def _start_plain(
        self, serving: Serving, body: OllamaGenerateRequest, token_ids: list[int]
    ) -> tuple[Generation, Answers]:
        with naming(FIELD_NAMES):
            params = sampling_params(sampling_of(body, serving), serving.engine.default_sampling)
            params = fitted(params, serving.engine.info.max_model_len - len(token_ids))
            serving.engine.validate(token_ids, params)
        prompts = [Prompt(token_ids, params)]
        generation = Generation(serving, prompts, id_prefix="gen-", field_names=FIELD_NAMES, timeout=body.timeout_s)
        return generation, Answers(None)

    def fields(self, answer: Answer) -> dict[str, Any]:
        thinking = {"thinking": answer.reasoning} if answer.reasoning else {}
        return {"response": answer.content, **thinking}


class LineStream(EventStream):
    """A JSON object in each line. Clients know no comments, so nothing keeps an idle connection alive."""

    media_type = "application/x-ndjson"


class LineWriter:
    """One answer: an object for each piece and one that says how it ended, or all in one object."""

    def __init__(
        self, generation: Generation, answers: Answers, fields: Fields, watch: "Stopwatch", *, with_context: bool
    ) -> None:
        self.generation = generation
        self.answers = answers
        self.fields = fields
        self.watch = watch
        self.tokenizer = generation.serving.engine.tokenizer
        self.spell = spelling(self.tokenizer, False)
        self.context = list(generation.prompts[0].token_ids) if with_context else None
        self.calls = Answer()
        """Tool calls so far; the last may still grow."""
        self.num_calls_sent = 0

    async def whole(self) -> bytes:
        output = CompletionOutput(0)
        async with aclosing(self.generation.run()) as batches:
            async for batch in batches:
                for _, more in batch:
                    self._count(more)
                    output.extend(more)
        return self._line(self.answers.whole(output), self._logprobs(output.logprobs), self._ending())

    def events(self, batch: OutputBatch) -> bytes:
        lines = []
        for index, output in batch:
            self._count(output)
            piece = self._piece(self.answers.delta(index, output), is_last=output.finish_reason is not None)
            logprobs = self._logprobs(output.logprobs)
            if piece.content or piece.reasoning or piece.tool_calls or logprobs:
                lines.append(self._line(piece, logprobs, {"done": False}) + b"\n")
        return b"".join(lines)

    def end(self) -> bytes:
        return self._line(Answer(), {}, self._ending()) + b"\n"

    def error(self, error: Exception) -> bytes:
        return ollama_error(error) + b"\n"

    def _piece(self, delta: DeltaMessage, *, is_last: bool) -> Answer:
        """Calls leave whole, when the next one begins or the answer ends."""
        self.calls.add(DeltaMessage(tool_calls=delta.tool_calls))
        end = len(self.calls.tool_calls) - (0 if is_last else 1)
        calls = self.calls.tool_calls[self.num_calls_sent : max(end, self.num_calls_sent)]
        self.num_calls_sent += len(calls)
        return Answer(delta.reasoning, delta.content, calls)

    def _count(self, output: RequestOutput) -> None:
        self.watch.token()
        self.generation.latest[0] = output
        if self.context is not None:
            self.context += output.token_ids

    def _line(self, answer: Answer, logprobs: dict[str, Any], ending: dict[str, Any]) -> bytes:
        return msgspec.json.encode({**head(self.generation.serving), **self.fields(answer), **logprobs, **ending})

    def _logprobs(self, positions: list[TokenLogprobs] | None) -> dict[str, Any]:
        return {"logprobs": chat_logprobs(self.spell, self.tokenizer, positions)["content"]} if positions else {}

    def _ending(self) -> dict[str, Any]:
        latest = self.generation.latest[0]
        assert latest is not None, self.generation.id
        metrics = self.watch.metrics(self.generation.num_prompt_tokens, self.generation.num_output_tokens)
        context = {} if self.context is None else {"context": self.context}
        return {"done": True, "done_reason": latest.finish_reason, **context, **msgspec.structs.asdict(metrics)}


class Stopwatch:
    """Times of one request."""

    def __init__(self) -> None:
        self._begun = self._prepared = time.perf_counter_ns()
        self._first = self._last = 0

    def prepared(self) -> None:
        self._prepared = time.perf_counter_ns()

    def token(self) -> None:
        self._last = time.perf_counter_ns()
        self._first = self._first or self._last

    def metrics(self, num_prompt_tokens: int, num_output_tokens: int) -> Metrics:
        return Metrics(
            total_duration=self._last - self._begun,
            load_duration=self._prepared - self._begun,
            prompt_eval_count=num_prompt_tokens,
            prompt_eval_duration=self._first - self._prepared,
            eval_count=num_output_tokens,
            eval_duration=self._last - self._first,
        )


def head(serving: Serving) -> dict[str, Any]:
    """What every object begins with."""
    return {"model": serving.model.id, "created_at": rfc3339(datetime.now(UTC))}


def rfc3339(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
