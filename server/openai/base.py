"""What /v1/completions and /v1/chat/completions share: fields of their requests, and the writer of their answers."""

import asyncio
from abc import abstractmethod
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
from server.generation import Generation
from server.sampling import SamplingFields, TruncateTo, given_fields
from server.sse import DONE, EVENT_END, EventStream, event, until_disconnect
from server.structured import CLOSED, JsonSchema, ResponseFormat, structured_field, structured_output

RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
"""As the header X-Request-Id: what could do harm nowhere that an id is printed."""
Priority = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Timeout = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
_INLINE_TOKENS = 2000
"""Answers of more tokens are written off the event loop: with log-probabilities one takes up to 20 µs."""


@CLOSED
class StreamOptions(TypedDict):
    include_usage: NotRequired[bool | None]
    """Send one more chunk with the usage and no choices before `[DONE]`."""
    continuous_usage_stats: NotRequired[bool | None]
    """Every chunk carries the usage so far."""
    include_obfuscation: NotRequired[bool | None]
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


class GenerationRequest(SamplingFields, ScheduledRequest):
    """Fields of /v1/completions and /v1/chat/completions."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
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
    return_token_ids: bool | None = None
    """Add the ids of prompt and output to the answer."""
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
        """Where the request's names differ from the engine's."""
        names = {}
        if field := structured_field(self):
            names["structured"] = field
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def given_sampling(self, config: ServerConfig) -> dict[str, Any]:
        """Fields of `SamplingParams` that the request gives. max_tokens is None when it leaves it out.

        Raises `InvalidRequest`.
        """
        check_stream_options(self.stream_options, self.stream)
        given = given_fields(self, config)
        return {**given, "max_tokens": self._max_tokens(), "structured": structured_output(self)}

    def _max_tokens(self) -> int | None:
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        value: int | None = getattr(self, name)
        answers_with_prompt = self.echo or self.prompt_logprobs is not None
        if value == 0 and not answers_with_prompt:
            raise InvalidRequest(f"{name} must be at least 1; got 0", param=name)
        return value


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    """Raises `InvalidRequest` where they ask for nothing that there is."""
    if options is not None and not stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if options and options.get("include_obfuscation"):
        raise InvalidRequest("include_obfuscation is not supported by this server", param="stream_options")


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Each prompt counts once, whatever `n` is; completion tokens sum over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


StopReason = int | str
"""The stop id or stop string that ended the choice; absent otherwise."""


class AnswerHead(TypedDict):
    """A whole answer or one chunk of it: what all four kinds begin with."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    """Of a chunk: absent unless asked for, then null in every chunk but the last."""


def usage_of(generation: Generation) -> Usage:
    """What was counted so far."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def with_usage(options: StreamOptions | None, config: ServerConfig) -> tuple[bool, bool]:
    """Whether the last chunk, and whether every chunk of a stream tells the usage."""
    given = options or {}
    in_last = bool(given.get("include_usage")) or config.enable_force_include_usage
    return in_last, bool(given.get("continuous_usage_stats"))


Request = TypeVar("Request", bound=GenerationRequest)


class OpenAIWriter(Generic[Request]):
    """Writes one answer, whole or in chunks. What all chunks begin and end with is encoded once."""

    whole_object: str
    chunk_object: str

    def __init__(self, generation: Generation, body: Request) -> None:
        self.generation = generation
        self.body = body
        self.tokenizer = generation.serving.engine.tokenizer
        self._usage_in_last, self._usage_in_all = with_usage(body.stream_options, generation.serving.config)
        self._is_first = True
        chunk = event(msgspec.json.encode(self._document(self.chunk_object, [])))
        self._head, _, self._tail = chunk.rpartition(b"[]")

    async def respond(self, request: ParsedRequest) -> Response:
        """The HTTP response; raises what the engine raises before the first token."""
        generation = self.generation
        if self.body.stream:
            keep_alive = generation.serving.config.sse_keep_alive_interval
            return EventStream(generation.run(self.body.stream_interval), self, keep_alive=keep_alive)
        outputs = await until_disconnect(request.receive, generation.whole())
        if sum(len(output.token_ids) for output in outputs) <= _INLINE_TOKENS:
            content = self.whole(outputs)
        else:
            content = await asyncio.to_thread(self.whole, outputs)
        return Response(content, media_type="application/json")

    @abstractmethod
    def choices(self, outputs: list[CompletionOutput]) -> list[Any]:
        """The choices of a finished answer."""

    @abstractmethod
    def chunks(self, index: int, output: RequestOutput) -> list[Any]:
        """Choices for zero or more chunks; the one with a finish reason is the choice's last."""

    def beside_choices(self, output: CompletionOutput | RequestOutput) -> dict[str, Any]:
        """Fields of the answer itself: of a whole one, and of the first chunk."""
        return {}

    def whole(self, outputs: list[CompletionOutput]) -> bytes:
        document = self._document(self.whole_object, self.choices(outputs))
        usage = usage_of(self.generation)
        return msgspec.json.encode({**document, "usage": usage, **self.beside_choices(outputs[0])})

    def events(self, batch: OutputBatch) -> bytes:
        chunks = []
        usage = None
        for index, output in batch:
            self.generation.latest[index] = output
            if self._usage_in_all:
                usage = usage_of(self.generation)
            for choice in self.chunks(index, output):
                chunk = self._chunk([choice], usage)
                chunks.append(self._first(chunk, output) if self._is_first else chunk)
        return b"".join(chunks)

    def end(self) -> bytes:
        return (self._chunk([], usage_of(self.generation)) if self._usage_in_last else b"") + DONE

    def error(self, error: Exception) -> bytes:
        return event(openai_error(error))

    def _first(self, chunk: bytes, output: RequestOutput) -> bytes:
        self._is_first = False
        if not (fields := self.beside_choices(output)):
            return chunk
        return chunk.removesuffix(b"}" + EVENT_END) + b"," + msgspec.json.encode(fields)[1:] + EVENT_END

    def _chunk(self, choices: list[Any], usage: Usage | None) -> bytes:
        begun = self._head + msgspec.json.encode(choices)
        if usage is not None or self._usage_in_last:
            begun += b',"usage":' + msgspec.json.encode(usage)
        return begun + self._tail

    def _document(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        generation = self.generation
        return {
            "id": generation.id,
            "object": kind,
            "created": generation.created,
            "model": generation.serving.model.id,
            "system_fingerprint": generation.serving.system_fingerprint,
            "choices": choices,
        }
