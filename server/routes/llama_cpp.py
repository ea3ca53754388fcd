"""llama.cpp's own routes: POST /completion and /infill, GET /props and /slots."""

from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import Unavailable
from configs.settings import ServerConfig
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.convert.llama_cpp import native_generation, passed_over, settings
from server.disconnect import until_disconnect
from server.errors import openai_error
from server.generation import Generation
from server.logprobs import LOWEST, spelling
from server.parsing import BodyParser, ignored_header
from server.protocol.llama_cpp import (
    NativeChunk,
    NativeCompletion,
    NativeLogprob,
    NativeRequest,
    NativeTopLogprob,
    Props,
    Slot,
    Timings,
)
from server.routes.ollama import Stopwatch
from server.sampling import sampling_params
from server.serving import serving_of
from server.sse import EventStream, event
from server.version import version


class NativeRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, config: ServerConfig, body_type: type[NativeRequest]) -> None:
        self.parser = BodyParser(body_type, config)

    async def __call__(self, request: Request) -> Response:
        watch = Stopwatch()
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)
        generation = await serving.preparation.prepare(request, lambda: native_generation(serving, body))
        watch.prepared()
        headers = ignored_header(parsed.ignored_fields + passed_over(body, generation.prompts[0].params))
        writer = NativeWriter(generation, body, watch, await _prompts(generation, body))
        if body.stream:
            interval = serving.config.sse_keep_alive_interval
            return EventStream(generation.run(), writer, headers, keep_alive=interval)
        whole = await until_disconnect(request.receive, writer.whole())
        return Response(whole, headers=headers, media_type="application/json")


async def _prompts(generation: Generation, body: NativeRequest) -> list[str]:
    """As the model reads them; empty where the answer does not have them."""
    if body.response_fields and "prompt" not in body.response_fields:
        return [""] * len(generation.prompts)
    engine = generation.serving.engine
    return [await engine.decode(prompt.token_ids, skip_special_tokens=False) for prompt in generation.prompts]


class NativeWriter:
    """Answers of one generation: whole, or event by event."""

    def __init__(self, generation: Generation, body: NativeRequest, watch: Stopwatch, prompts: list[str]) -> None:
        self.generation = generation
        self.body = body
        self.watch = watch
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
                chunk = NativeChunk(**self._fields(index, output, with_tokens=True))
                events += event(msgspec.json.encode(self._picked(chunk)))
            if output.finish_reason is not None:
                events += event(msgspec.json.encode(self._answer(index, output, with_text=False)))
        return events

    def end(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))

    def _note(self, index: int, output: RequestOutput) -> None:
        self.watch.token()
        self.generation.latest[index] = output
        if "\n" in output.text:
            self.with_new_line.add(index)

    def _fields(self, index: int, output: CompletionOutput | RequestOutput, *, with_tokens: bool) -> dict[str, Any]:
        latest = self.generation.latest[index]
        assert latest is not None, self.generation.id
        return {
            "index": index,
            "content": output.text,
            "tokens": output.token_ids if with_tokens else [],
            "tokens_predicted": latest.num_output_tokens,
            "tokens_evaluated": latest.num_prompt_tokens,
            "completion_probabilities": self._logprobs(output.logprobs),
        }

    def _answer(self, index: int, output: CompletionOutput | RequestOutput, *, with_text: bool) -> object:
        latest, prompt = self.generation.latest[index], self.generation.prompt_of(index)
        assert latest is not None, self.generation.id
        fields = self._fields(index, output, with_tokens=bool(self.body.return_tokens))
        if not with_text:
            fields |= {"content": "", "tokens": [], "completion_probabilities": UNSET}
        stopping_word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        ended = "word" if stopping_word else "eos" if output.finish_reason == "stop" else "limit"
        serving = self.generation.serving
        return self._picked(
            NativeCompletion(
                **fields,
                model=serving.model.id,
                generation_settings=settings(prompt.params, serving.engine.info.max_model_len),
                prompt=self.prompts[index // self.generation.n],
                has_new_line=index in self.with_new_line,
                stop_type=ended,
                stopping_word=stopping_word,
                tokens_cached=latest.num_cached_tokens,
                timings=self._timings(latest),
            )
        )

    def _timings(self, latest: RequestOutput) -> Timings:
        cached, predicted = latest.num_cached_tokens, latest.num_output_tokens
        computed = latest.num_prompt_tokens - cached
        metrics = self.watch.metrics(computed, predicted)
        prompt_ms, predicted_ms = metrics.prompt_eval_duration / 1e6, metrics.eval_duration / 1e6
        return Timings(
            cache_n=cached,
            prompt_n=computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / max(1, computed),
            prompt_per_second=computed / prompt_ms * 1e3 if prompt_ms else 0.0,
            predicted_n=predicted,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / max(1, predicted),
            predicted_per_second=predicted / predicted_ms * 1e3 if predicted_ms else 0.0,
        )

    def _logprobs(self, positions: list[TokenLogprobs] | None) -> list[NativeLogprob] | UnsetType:
        if not positions:
            return UNSET
        return [
            NativeLogprob(
                **msgspec.structs.asdict(self._logprob(one.token_id, one.logprob)),
                top_logprobs=[self._logprob(token_id, logprob) for token_id, logprob in one.top],
            )
            for one in positions
        ]

    def _logprob(self, token_id: int, logprob: float) -> NativeTopLogprob:
        raw = list(self.tokenizer.token_bytes(token_id))
        return NativeTopLogprob(token_id, self.spell(token_id), raw, max(LOWEST, logprob))

    def _picked(self, answer: NativeChunk) -> object:
        """The answer, or of it the fields that the request asks for by name."""
        if not self.body.response_fields:
            return answer
        whole = msgspec.to_builtins(answer)
        found = {path: _at(whole, path) for path in self.body.response_fields}
        return {path: value for path, value in found.items() if value is not UNSET}


def _at(value: Any, path: str) -> Any:
    for name in path.split("/"):
        value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
    return value


async def props(request: Request) -> Response:
    serving = serving_of(request)
    engine = serving.engine
    params = sampling_params({"max_tokens": None}, engine.default_sampling)
    limit = engine.info.max_model_len
    tokens = engine.tokenizer.special_tokens
    found = Props(
        default_generation_settings={"n_ctx": limit, "params": settings(params, limit)},
        total_slots=serving.config.max_num_seqs,
        model_alias=serving.model.id,
        model_path=serving.model.id,
        chat_template=engine.chat_template or "",
        bos_token=tokens.get("bos_token") or "",
        eos_token=tokens.get("eos_token") or "",
        modalities={"vision": False, "audio": False},
        build_info=f"octavo-{version()}",
    )
    return _json(found)


async def slots(request: Request) -> Response:
    """One slot for each request of a step. With `fail_on_no_slot`, a 503 where every slot is taken."""
    serving = serving_of(request)
    total, running = serving.config.max_num_seqs, serving.engine.stats().num_running
    if request.query_params.get("fail_on_no_slot") and running >= total:
        raise Unavailable("no slot is free", retry_after=1)
    return _json([Slot(index, serving.engine.info.max_model_len, index < running) for index in range(total)])


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
