"""POST /v1/completions."""

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from configs.errors import InvalidRequest
from configs.sampling import SamplingParams
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, RequestOutput
from server.convert import completion_prompts, fit_to_context, sampling_params
from server.generation import Generation
from server.logprobs import completion_logprobs
from server.parsing import BodyParser
from server.protocol.completions import CompletionChoice, CompletionLogprobs, CompletionRequest
from server.serving import Serving, TokenizerFace, check_number_of_choices, serving_of


class CompletionsRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, max_body_bytes: int) -> None:
        self.parser = BodyParser(CompletionRequest, max_body_bytes)

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)
        params = sampling_params(body, serving.engine.default_sampling, serving.config)
        texts_or_ids = completion_prompts(body)
        check_number_of_choices(len(texts_or_ids), params.n, serving.config)
        prompts = [await self._prompt(serving, body, prompt, params) for prompt in texts_or_ids]
        renderer = CompletionRenderer(serving.engine.tokenizer)
        return await Generation(serving, body, prompts, renderer).respond(request, parsed.ignored_fields)

    async def _prompt(
        self, serving: Serving, body: CompletionRequest, prompt: str | list[int], params: SamplingParams
    ) -> tuple[list[int], SamplingParams]:
        """Token ids of one prompt, checked, and the parameters that fit it."""
        engine = serving.engine
        token_ids = prompt if isinstance(prompt, list) else await self._encode(serving, body, prompt)
        fitting = fit_to_context(params, body, len(token_ids), engine.info.max_model_len)
        engine.validate(token_ids, fitting)
        return token_ids, fitting

    async def _encode(self, serving: Serving, body: CompletionRequest, text: str) -> list[int]:
        """An empty text begins a new document where the tokenizer has a token for that."""
        tokenizer = serving.engine.tokenizer
        add_special_tokens = body.add_special_tokens is not False
        token_ids = await serving.engine.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids and tokenizer.bos_token_id is not None:
            return [tokenizer.bos_token_id]
        if not token_ids:
            raise InvalidRequest("prompt is empty, and the model has no token to begin with", param="prompt")
        return token_ids


class CompletionRenderer:
    """Choices of /v1/completions."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: TokenizerFace) -> None:
        self.tokenizer = tokenizer
        self.offsets: dict[int, int] = {}
        """Characters of the tokens that were sent, per choice."""

    def whole(self, output: CompletionOutput) -> CompletionChoice:
        return CompletionChoice(
            index=output.index,
            text=output.text,
            logprobs=self._logprobs(output.index, output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=UNSET if output.stop_reason is None else output.stop_reason,
        )

    def chunks(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        """Text and reason travel apart, as from OpenAI: the finish chunk is empty."""
        choices = []
        if output.text or output.logprobs:
            logprobs = self._logprobs(index, output.logprobs)
            choices.append(CompletionChoice(index=index, text=output.text, logprobs=logprobs))
        if output.finish_reason is not None:
            stop_reason = UNSET if output.stop_reason is None else output.stop_reason
            choices.append(
                CompletionChoice(index=index, text="", finish_reason=output.finish_reason, stop_reason=stop_reason)
            )
        return choices

    def _logprobs(self, index: int, positions: list[TokenLogprobs] | None) -> CompletionLogprobs | None:
        if positions is None:
            return None
        rendered = completion_logprobs(self.tokenizer, positions, self.offsets.get(index, 0))
        if rendered.tokens:
            self.offsets[index] = rendered.text_offset[-1] + len(rendered.tokens[-1])
        return rendered
