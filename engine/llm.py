"""`LLM`: the engine for scripts, in this process and without a server."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from configs.errors import RequestError, RequestFailed, SettingsError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig
from configs.sources import did_you_mean, resolve

from .core import EngineCore
from .input_processor import InputProcessor
from .messages import AddRequest, TokenOutput
from .output_processor import OutputProcessor
from .outputs import CompletedRequest, CompletionOutput

Prompt = str | Sequence[int]


class LLM:
    """Batches of prompts in, completed requests out.

        llm = LLM("path/to/checkpoint", max_model_len=2048)
        [request] = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
        print(request.outputs[0].text)

    The keywords are the fields of `EngineConfig`. Raises `UsageError` when they do not fit the checkpoint.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        known = {field.name for field in msgspec.structs.fields(EngineConfig)}
        for name in settings:
            if name not in known:
                raise SettingsError(f"unknown setting {name}{did_you_mean(name, known)}")
        config = resolve(EngineConfig, flags={"model": model, **settings})
        self._inputs = InputProcessor(config)
        self._core = EngineCore(config)
        self._request_ids = map(str, itertools.count())
        self.info = self._core.ready
        self.tokenizer = self._inputs.tokenizer
        self.default_sampling = self._inputs.default_sampling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[CompletedRequest]:
        """Complete every prompt, a text or token ids, each with its own parameters or all with the same.

        Results are in the order of the prompts. Without parameters, the checkpoint's own apply. Raises
        `InvalidRequest` before anything runs; a request that fails later has finish reason `error`.
        """
        requests = self._requests(prompts)
        return self._run(requests, self._params_of_each(sampling_params, len(requests)))

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_kwargs: Any,
    ) -> list[CompletedRequest]:
        """Answer one chat (a list of messages) or several (a list of such lists)."""
        chats = [messages] if isinstance(messages[0], Mapping) else messages
        rendered = [self._inputs.render_chat(chat, **template_kwargs) for chat in chats]
        requests = [CompletedRequest(text, token_ids, []) for text, token_ids in rendered]
        return self._run(requests, self._params_of_each(sampling_params, len(requests)))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: Literal["last", "mean"] | None = None
    ) -> list[list[float]]:
        """The final hidden state of each prompt's last token, or the mean over its tokens; not scaled to length 1.
        Without `pooling`, the checkpoint says which.

        Raises `InvalidRequest` before anything runs, and `RequestFailed` when one of them fails later.
        """
        requests = self._requests(prompts)
        params = SamplingParams(max_tokens=0, pooling=pooling or self._inputs.default_pooling)
        embeddings = []
        for request in self._run(requests, [params] * len(requests)):
            [output] = request.outputs
            if output.embedding is None:
                raise RequestFailed(output.error or "")
            embeddings.append(output.embedding)
        return embeddings

    def _requests(self, prompts: Prompt | Sequence[Prompt]) -> list[CompletedRequest]:
        requests = []
        for prompt in _as_list(prompts):
            text = prompt if isinstance(prompt, str) else None
            token_ids = self._inputs.encode(prompt) if isinstance(prompt, str) else list(prompt)
            requests.append(CompletedRequest(text, token_ids, []))
        return requests

    def _params_of_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.default_sampling)
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ValueError(f"{len(params)} sampling parameters for {count} prompts")
        return list(params)

    def _run(self, requests: list[CompletedRequest], params: list[SamplingParams]) -> list[CompletedRequest]:
        for request, each in zip(requests, params, strict=True):
            self._inputs.validate(request.prompt_token_ids, each, self.info)
        running: dict[str, _Choice] = {}
        try:
            for request, each in zip(requests, params, strict=True):
                for index in range(each.n):
                    self._start(request, index, self._inputs.prepare(each).for_choice(index), running)
            while running:
                for output in self._core.step():
                    self._take(output, running)
        finally:  # an interrupted call leaves nothing behind
            self._core.abort_requests(list(running))
        return requests

    def _start(
        self, request: CompletedRequest, index: int, params: SamplingParams, running: dict[str, "_Choice"]
    ) -> None:
        request_id = next(self._request_ids)
        running[request_id] = _Choice(request, index, OutputProcessor(self.tokenizer, request.prompt_token_ids, params))
        refusal = self._core.add_request(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=params,
                eos_token_ids=self._inputs.tokenizer.eos_token_ids,
            )
        )
        if refusal is not None:
            self._take(refusal, running)

    def _take(self, output: TokenOutput, running: dict[str, "_Choice"]) -> None:
        choice = running[output.request_id]
        choice.take(output)
        if choice.completion.finish_reason is not None:
            del running[output.request_id]
            if output.finish_reason is None:  # a stop string, of which the core knows nothing
                self._core.abort_requests([output.request_id])


class _Choice:
    """One running choice of a request."""

    def __init__(self, request: CompletedRequest, index: int, processor: OutputProcessor) -> None:
        self.completion = CompletionOutput(index)
        self._request = request
        self._processor = processor
        request.outputs.append(self.completion)

    def take(self, output: TokenOutput) -> None:
        try:
            delta = self._processor.process(output)
        except RequestError as error:
            self.completion.finish_reason = "error"
            self.completion.error = error.message
            return
        self.completion.extend(delta)
        self._request.num_cached_tokens = delta.num_cached_tokens


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text, or a single list of token ids, is one prompt."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
