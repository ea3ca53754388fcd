"""What the routes that generate share: fields of their requests and answers, and the writer of answers."""

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar

import msgspec
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.settings import MAX_SECONDS, ServerConfig
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.bodies import Hint, ModelRequest, ParsedRequest, Unsupported
from server.errors import openai_error
from server.generation import Generation, Prompt
from server.logprobs import PromptLogprobs, prompt_logprobs
from server.sampling import SamplingFields, TruncateTo, beam_length_penalty, given_fields
from server.sse import DONE, EVENT_END, EventStream, EventWriter, event, until_disconnect
from server.structured import CLOSED, JsonSchema, ResponseFormat, structured_field, structured_output

RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
"""As the header X-Request-Id: what could do harm nowhere that an id is printed."""
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Timeout = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
_INLINE_TOKENS = 2000
"""Answers of more tokens are written off the event loop: with log-probabilities one takes up to 20 µs."""


@CLOSED
class StreamOptions(TypedDict, total=False):
    include_usage: bool | None
    """Send one more chunk with the usage and no choices before `[DONE]`."""
    continuous_usage_stats: bool | None
    """Every chunk carries the usage so far."""
    include_obfuscation: Literal[False] | None
    """Only false is honoured: chunks are not padded."""


class ScheduledRequest(ModelRequest):
    """Fields that say when a request runs, and with whom it shares cached prefixes."""

    request_id: RequestId | None = None
    """The answer's id ends with it; no two running requests of one key may have the same."""
    priority: Priority | None = None
    """Lower runs first under the `priority` policy."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with equal salts."""
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is, with finish_reason `timeout`; the server may have a bound of its own."""


class StreamedRequest(ScheduledRequest):
    """Fields of all requests whose answers may come in chunks."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Add the ids of prompt and output to the answer."""

    def options(self, sampling: SamplingFields) -> dict[str, Any]:
        """Fields of `GenerationOptions`. Raises `InvalidRequest` for fields that mean nothing in beam search."""
        return {
            **{name: getattr(self, name) for name in ("request_id", "priority", "cache_salt")},
            "timeout": self.timeout_s,
            "beam_length_penalty": beam_length_penalty(sampling, self.stream),
        }

    def check_stream_options(self) -> None:
        """Raises `InvalidRequest` for options of an answer that is not streamed."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")


class GenerationRequest(SamplingFields, StreamedRequest):
    """Fields of /v1/completions and /v1/chat/completions."""

    stream_interval: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Send a choice's text every so many tokens; the first comes at once."""
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    """The newer name of max_tokens; wins when both are given."""
    echo: bool | None = None
    """Begin the answer with the prompt; of a chat, with the message that it continues."""
    response_format: ResponseFormat | None = None
    guided_json: str | JsonSchema | None = None
    """The older name of what `structured_outputs` holds as `json`."""
    guided_regex: str | None = None
    """The older name of its `regex`."""
    guided_choice: list[str] | None = None
    """The older name of its `choice`."""
    guided_grammar: str | None = None
    """The older name of its `grammar`."""
    return_tokens_as_token_ids: bool | None = None
    """Write the tokens of logprobs as `token_id:7`, which tells tokens of equal text apart."""
    truncate_prompt_tokens: TruncateTo | None = None
    """Keep only this many of the prompt's tokens; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are left out (default left)."""

    kv_transfer_params: Annotated[Any, Unsupported()] = None
    logits_processors: Annotated[Any, Unsupported(([],))] = None
    prompt_embeds: Annotated[Any, Unsupported()] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported((True,))] = None
    prediction: Annotated[Any, Hint()] = None
    prompt_cache_options: Annotated[Any, Hint(({}, {"mode": "implicit"}))] = None
    prompt_cache_retention: Annotated[Any, Hint()] = None
    service_tier: Annotated[Any, Hint(("auto", "default"))] = None
    store: Annotated[Any, Hint((False,))] = None
    verbosity: Annotated[Any, Hint(("medium",))] = None
    metadata: Any = None
    """A label, as the four below: it changes nothing."""
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    session_id: Any = None
    user: Any = None

    @property
    def field_names(self) -> dict[str, str]:
        """The request's names of fields, where they differ from the engine's."""
        names = {"structured": structured_field(self), "max_tokens": self._max_tokens_name}
        return {name: field for name, field in names.items() if field}

    @property
    def _max_tokens_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def given_sampling(self, config: ServerConfig) -> dict[str, Any]:
        """Fields of `SamplingParams` that the request gives. max_tokens is None when it leaves it out.

        Raises `InvalidRequest`.
        """
        self.check_stream_options()
        given = given_fields(self, config)
        name = self._max_tokens_name
        max_tokens = getattr(self, name)
        if max_tokens == 0 and not self.echo and self.prompt_logprobs is None:  # nor is there anything else to say
            raise InvalidRequest(f"{name} must be at least 1; got 0", param=name)
        return {**given, "max_tokens": max_tokens, "structured": structured_output(self)}


class PromptUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(PromptUsage):
    """Each prompt counts once, whatever `n` is; completion tokens sum over all choices."""

    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerHead(TypedDict):
    """A whole answer or one chunk of it: what all four kinds begin with."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    """Of a chunk: absent unless asked for, then null in every chunk but the last."""


class PromptFields(TypedDict, total=False):
    prompt_token_ids: list[int]
    """This and the next, if asked for; of a stream, in the first chunk."""
    prompt_logprobs: PromptLogprobs


class Choice(TypedDict):
    """What choices of whole answers and of chunks have in common."""

    index: int
    finish_reason: str | None
    """Null in all chunks but the choice's last."""
    stop_reason: NotRequired[int | str]
    """The stop id or stop string that ended the choice; absent otherwise."""
    token_ids: NotRequired[list[int]]


AnyChoice = TypeVar("AnyChoice", bound=Choice)
Output = CompletionOutput | RequestOutput


def finished(choice: AnyChoice, output: Output, reason: str | None) -> AnyChoice:
    """The choice with what ended it."""
    choice["finish_reason"] = reason
    if output.stop_reason is not None:
        choice["stop_reason"] = output.stop_reason
    return choice


def usage_of(generation: Generation) -> Usage:
    """The tokens that were counted so far."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


AnyRequest = TypeVar("AnyRequest", bound=StreamedRequest)


class OpenAIWriter(EventWriter, Generic[AnyRequest]):
    """Writes one answer, whole or in chunks. What all chunks begin with is encoded once."""

    whole_object: str
    chunk_object: str
    has_null_usage = True
    """Where the last chunk tells the usage, the others have null."""

    def __init__(self, generation: Generation, body: AnyRequest) -> None:
        self.generation = generation
        self.body = body
        self.tokenizer = generation.serving.engine.tokenizer
        options, config = body.stream_options or {}, generation.serving.config
        self._usage_in_last = bool(options.get("include_usage")) or config.enable_force_include_usage
        self._usage_in_all = bool(options.get("continuous_usage_stats"))
        self.begun: set[int] = set()
        """Choices of which something was sent."""
        self._has_begun = False
        self._plain_end = self._end(None)
        self._begin = b"data: " + msgspec.json.encode({**self.head(is_chunk=True), "choices": []}).removesuffix(b"[]}")

    async def respond(self, request: ParsedRequest, interval: int | None = None) -> Response:
        """The HTTP response, in chunks every `interval` tokens of a choice if they are asked for.

        Raises what the engine raises before the first token.
        """
        if self.body.stream:
            keep_alive = self.generation.serving.config.sse_keep_alive_interval
            return EventStream(self.generation.run(interval), self, keep_alive=keep_alive)
        outputs = await until_disconnect(request.receive, self.generation.whole())
        if sum(len(output.token_ids) for output in outputs) <= _INLINE_TOKENS:
            content = self.whole(outputs)
        else:
            content = await asyncio.to_thread(self.whole, outputs)
        return Response(content, media_type="application/json")

    def choices(self, outputs: list[CompletionOutput]) -> list[Any]:
        """The choices of a finished answer."""
        return [self.choice(output.index, output) for output in outputs]

    @abstractmethod
    def choice(self, index: int, output: CompletionOutput) -> Any:
        """A choice of a whole answer."""

    @abstractmethod
    def chunks(self, index: int, output: RequestOutput) -> list[Any]:
        """Choices for zero or more chunks; the one with a finish reason is the choice's last."""

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """What a whole answer or a chunk begins with."""
        generation = self.generation
        return {
            "id": generation.id,
            "object": self.chunk_object if is_chunk else self.whole_object,
            "created": generation.created,
            "model": generation.serving.model.id,
            "system_fingerprint": generation.serving.system_fingerprint,
        }

    def beside_choices(self, output: Output) -> PromptFields:
        """Fields of the answer itself: of a whole one, and of the first chunk."""
        fields: PromptFields = {}
        [prompt] = self.generation.prompts
        self.add_prompt_fields(fields, prompt, output, prompt.params.prompt_logprobs)
        return fields

    def add_prompt_fields(self, to: PromptFields, prompt: Prompt, output: Output, num_logprobs: int | None) -> None:
        """Add what the request asks to know of a prompt; `output` is the first of one of its choices."""
        if self.body.return_token_ids:
            to["prompt_token_ids"] = prompt.token_ids
        if num_logprobs is not None:
            to["prompt_logprobs"] = prompt_logprobs(self.tokenizer, output.prompt_logprobs or [], num_logprobs)

    def whole(self, outputs: list[CompletionOutput]) -> bytes:
        fields = {"choices": self.choices(outputs), "usage": usage_of(self.generation)}
        return msgspec.json.encode({**self.head(is_chunk=False), **fields, **self.beside_choices(outputs[0])})

    def events(self, batch: OutputBatch) -> bytes:
        for index, output in batch:
            self.generation.latest[index] = output
        end = self._end(usage_of(self.generation)) if self._usage_in_all else self._plain_end
        pieces: list[bytes] = []
        for index, output in batch:
            for choice in self.chunks(index, output):
                pieces += self._begin, msgspec.json.encode([choice]), end
        if pieces and not self._has_begun:
            self._has_begun = True
            pieces[1] += _inside(self.beside_choices(batch[0][1]))
        return b"".join(pieces)

    def end(self) -> bytes:
        last = self._begin + b"[]" + self._end(usage_of(self.generation)) if self._usage_in_last else b""
        return last + DONE

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))

    def _end(self, usage: Usage | None) -> bytes:
        """What a chunk ends with, behind its choices."""
        has_usage = usage is not None or (self._usage_in_last and self.has_null_usage)
        return (_inside({"usage": usage}) if has_usage else b"") + b"}" + EVENT_END


def _inside(fields: Mapping[str, Any]) -> bytes:
    """These fields as they stand behind others in an object."""
    return b"," + msgspec.json.encode(fields)[1:-1] if fields else b""
