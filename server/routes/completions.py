"""POST /v1/completions."""

from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from configs.settings import ServerConfig
from engine.outputs import CompletionOutput, RequestOutput
from server.choices import respond
from server.convert.completions import completion_prompts
from server.convert.sampling import beam_length_penalty
from server.convert.structured import field_names
from server.generation import Generation, Prompt
from server.logprobs import CompletionTokens, prompt_logprobs
from server.parsing import BodyParser, ignored_header
from server.protocol.common import PromptLogprobs
from server.protocol.completions import CompletionChoice, CompletionLogprobs, CompletionRequest
from server.serving import serving_of


class CompletionsRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(CompletionRequest, config)

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)
        prompts = await serving.preparation.prepare(request, lambda: completion_prompts(serving, body))
        generation = Generation(
            serving,
            prompts,
            id_prefix="cmpl-",
            priority=body.priority,
            cache_salt=body.cache_salt,
            field_names=field_names(body),
            request_id=body.request_id,
            timeout=body.timeout_s,
            beam_length_penalty=beam_length_penalty(body, body.stream),
        )
        renderer = CompletionRenderer(generation, body)
        return await respond(generation, body, renderer, request, ignored_header(parsed.ignored_fields))


class CompletionRenderer:
    """Choices of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        self.generation = generation
        self.body = body
        self.tokenizer = generation.serving.engine.tokenizer
        self.tokens: dict[int, CompletionTokens] = {}
        """How the tokens of each choice are written, as far as they were sent."""
        self.begins_with_prompt = bool(body.echo or body.return_token_ids or body.prompt_logprobs is not None)
        self.begun: set[int] = set()
        """Choices whose prompt was sent."""
        self.is_plain = not self.begins_with_prompt and body.logprobs is None
        """Chunks hold text alone."""

    def beside_choices(self, output: CompletionOutput | RequestOutput) -> dict[str, Any]:
        return {}

    def whole(self, outputs: list[CompletionOutput]) -> list[CompletionChoice]:
        kept = self.body.n or 1
        if kept < self.generation.n:
            outputs = best_of(outputs, self.generation.n, kept)
        return [self._choice(index, output, whole=True) for index, output in enumerate(outputs)]

    def chunks(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        """Text and reason travel apart, as from OpenAI: the finish chunk is empty."""
        choices = []
        if self.is_plain:
            if output.text:
                choices.append(CompletionChoice(index=index, text=output.text))
        elif output.text or output.token_ids or index not in self.begun:
            choices.append(self._choice(index, output, whole=False))
        if output.finish_reason is not None:
            stop_reason = UNSET if output.stop_reason is None else output.stop_reason
            choices.append(
                CompletionChoice(index=index, text="", finish_reason=output.finish_reason, stop_reason=stop_reason)
            )
        return choices

    def _choice(self, index: int, output: CompletionOutput | RequestOutput, *, whole: bool) -> CompletionChoice:
        """A whole choice, or a chunk of its text; the first one has what is said of the prompt."""
        begins = index not in self.begun
        self.begun.add(index)
        return CompletionChoice(
            index=index,
            text=(self._prompt(index).text or "") + output.text if begins else output.text,
            logprobs=self._logprobs(index, output, begins=begins),
            finish_reason=output.finish_reason if whole else None,
            stop_reason=UNSET if not whole or output.stop_reason is None else output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else UNSET,
            prompt_token_ids=self._prompt(index).token_ids if begins and self.body.return_token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(output) if begins else UNSET,
        )

    def _prompt(self, index: int) -> Prompt:
        return self.generation.prompts[index // (self.body.n or 1)]

    def _prompt_logprobs(self, output: CompletionOutput | RequestOutput) -> PromptLogprobs | UnsetType:
        count = self.body.prompt_logprobs
        return UNSET if count is None else prompt_logprobs(self.tokenizer, output.prompt_logprobs or [], count)

    def _logprobs(
        self, index: int, output: CompletionOutput | RequestOutput, *, begins: bool
    ) -> CompletionLogprobs | None:
        count = self.body.logprobs
        if count is None:
            return None
        tokens = self.tokens.get(index)
        if tokens is None:
            tokens = self.tokens[index] = CompletionTokens(self.tokenizer, self.body.return_tokens_as_token_ids)
        if begins and self.body.echo:
            echoed = tokens.echoed(self._prompt(index).token_ids, output.prompt_logprobs or [], count)
            return echoed.joined(tokens.logprobs(output.logprobs or []))
        return tokens.logprobs(output.logprobs or [])


def best_of(outputs: list[CompletionOutput], generated: int, kept: int) -> list[CompletionOutput]:
    """Of each prompt's `generated` choices the `kept` with the highest mean log-probability per token."""
    best: list[CompletionOutput] = []
    for start in range(0, len(outputs), generated):
        best += sorted(outputs[start : start + generated], key=_mean_logprob, reverse=True)[:kept]
    return best


def _mean_logprob(output: CompletionOutput) -> float:
    logprobs = output.logprobs or []
    return sum(position.logprob for position in logprobs) / max(1, len(logprobs))
