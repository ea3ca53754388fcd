"""POST /api/chat and /api/generate."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Required

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.sampling import StructuredOutput
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, OutputBatch, RequestOutput
from server.answers.delta import Answer, DeltaMessage
from server.bodies import BodyRoute, Hint, ModelRequest, ParsedRequest, Unsupported
from server.chat import Answers, Chat
from server.documented import LINES, streamed
from server.errors import OllamaError, error_statuses, ollama_error
from server.generation import Generation, GenerationOptions, Prompt, naming
from server.logprobs import TokenLogprob, chat_logprobs
from server.metrics.records import current_phases
from server.openai.base import Timeout
from server.openai.messages import Content, Tool, ToolCall, template_messages
from server.sampling import AlsoFloat, Integer, LlamaSampling, NumLogprobs, Text, TokenId, fitted, sampling_params
from server.serving import Serving, ServingOf
from server.shortening import encode_shortened, start_shortened, without_beginning, without_oldest
from server.sse import EventStream, EventWriter, until_disconnect
from server.structured import json_schema
from server.tools import offered, tool_input

router = APIRouter(route_class=BodyRoute, tags=["Ollama"], responses=error_statuses(form=OllamaError))
_FIELD_NAMES = {"max_tokens": "options", "structured": "format"}


class OllamaBody(ModelRequest):
    any_content_type: ClassVar[bool] = True
    """Clients send what their HTTP library does of its own accord, as curl does in Ollama's examples."""


class OllamaOptions(LlamaSampling):
    """How one answer is decoded. Options of other engines that would change an answer are ignored and reported."""

    num_predict: Annotated[Literal[-1, -2] | Annotated[int, Field(ge=1, lt=2**63)], AlsoFloat] | None = None
    """Most tokens to generate; -1 and -2 are as many as the context holds."""
    num_ctx: Integer | None = None
    """The context is always the server's; more than that cannot be had."""

    embedding_only: Annotated[Any, Hint((False,))] = None
    logits_all: Annotated[Any, Hint((False,))] = None
    mirostat: Annotated[Any, Hint((0,))] = None
    penalize_newline: Annotated[Any, Hint((True,))] = None
    tfs_z: Annotated[Any, Hint((1,))] = None
    typical_p: Annotated[Any, Hint((1,))] = None
    vocab_only: Annotated[Any, Hint((False,))] = None

    # of resources, or of what is a hint above
    draft_num_predict: Any = None
    f16_kv: Any = None
    low_vram: Any = None
    main_gpu: Any = None
    mirostat_eta: Any = None
    mirostat_tau: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_keep: Any = None
    num_thread: Any = None
    numa: Any = None
    use_mlock: Any = None
    use_mmap: Any = None


class OllamaRequest(OllamaBody):
    """What /api/chat and /api/generate share."""

    stream: bool | None = None
    """Default true."""
    format: Literal["", "json"] | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    options: OllamaOptions | None = None
    think: bool | str | None = None
    """Whether the template lets the model think; a text is also its `reasoning_effort`."""
    logprobs: bool | None = None
    """Tell the log-probabilities of the answer's tokens."""
    top_logprobs: NumLogprobs | None = None
    """And of this many likeliest tokens; without logprobs it is ignored, and reported."""
    truncate: bool | None = None
    """False: refuse what the context does not hold. Else a chat loses its oldest messages, a prompt its beginning."""
    shift: Annotated[bool | None, Hint((False,))] = None
    """True, to drop the beginning when the answer fills the context, is ignored: the answer ends there."""
    timeout_s: Timeout | None = None
    """Seconds until the answer ends as it is; the server may have a bound of its own."""
    keep_alive: Any = None
    """The model stays loaded."""

    @property
    def thinking(self) -> dict[str, Any]:
        """What the template is to know of `think`."""
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {} if self.think is None else {"enable_thinking": bool(self.think), **effort}

    @property
    def unknown_fields(self) -> list[str]:
        return super().unknown_fields + [f"options.{name}" for name in getattr(self.options, "unknown_fields", ())]

    @property
    def ignored_fields(self) -> list[str]:
        of_options = [f"options.{name}" for name in getattr(self.options, "ignored_fields", ())]
        alone = ["top_logprobs"] if self.top_logprobs and not self.logprobs else []
        return [*dict.fromkeys(super().ignored_fields + of_options + alone)]


class OllamaMessage(TypedDict):
    role: Text
    """system, user, assistant or tool."""
    content: NotRequired[Content | None]
    thinking: NotRequired[str | None]
    images: NotRequired[list[Any] | None]
    """A model of texts reads none: those of tools are left out, others refused."""
    tool_calls: NotRequired[list[ToolCall] | None]
    tool_name: NotRequired[str | None]
    """Of a tool's message: the function."""


class OllamaChatRequest(OllamaRequest):
    messages: list[OllamaMessage] | None = None
    """One that ends with an assistant's text is continued by the answer. Without any, nothing is generated."""
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest):
    prompt: str | None = None
    """Of the user. Without one, nothing is generated."""
    suffix: str | None = None
    """What comes behind the answer, for models that can fill in the middle; they get no chat template."""
    system: str | None = None
    raw: bool | None = None
    """The prompt goes to the model without a chat template."""
    context: list[TokenId] | None = None
    """Token ids that an earlier answer gave, to be continued."""
    template: Annotated[Any, Unsupported(("",))] = None
    """In Go's language."""
    images: Annotated[Any, Unsupported(([],))] = None
    height: Annotated[Any, Unsupported((0,))] = None
    width: Annotated[Any, Unsupported((0,))] = None
    steps: Annotated[Any, Unsupported((0,))] = None


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


class OllamaAnswer(TypedDict, total=False):
    """In one piece, or a line of a stream, of which the last has what is not in every line. Durations are nanoseconds,
    whose three parts make up the total; counts are of tokens."""

    model: Required[str]
    created_at: Required[str]
    done: Required[bool]
    logprobs: list[TokenLogprob]
    done_reason: str
    total_duration: int
    load_duration: int
    """Until the engine had the prompt; the model was there already."""
    prompt_eval_count: int
    prompt_eval_duration: int
    """Until the first token."""
    eval_count: int
    eval_duration: int


class OllamaChatAnswer(OllamaAnswer):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]
    """Token ids of prompt and answer, to be continued."""


@router.post("/api/chat", response_model=OllamaChatAnswer, responses=streamed(OllamaChatAnswer, LINES))
async def chat(body: OllamaChatRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a chat."""
    return await _respond(body, request, serving, only_load=not body.messages)


@router.post("/api/generate", response_model=OllamaGenerateAnswer, responses=streamed(OllamaGenerateAnswer, LINES))
async def generate(body: OllamaGenerateRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a prompt, or write what is missing in a text."""
    return await _respond(body, request, serving, only_load=not body.prompt and not body.suffix)


Body = OllamaChatRequest | OllamaGenerateRequest


async def _respond(body: Body, request: ParsedRequest, serving: Serving, *, only_load: bool) -> Response:
    if only_load:
        return JSONResponse({**_fields(body, serving, Answer()), "done": True, "done_reason": "load"})
    generation, answers, headers = await request.prepare(lambda: _start(body, serving))
    options = body.options or OllamaOptions()
    ignored = options.served_otherwise(generation.prompts[0].params)
    if (options.num_ctx or 0) > serving.model.max_model_len:
        ignored.append("num_ctx")
    request.ignored_fields += [f"options.{name}" for name in ignored] + generation.passed_over
    writer = LineWriter(generation, answers, body)
    if body.stream is not False:
        return EventStream(generation.run(), writer, {"content-type": LINES, **headers})  # clients know no comments
    whole = writer.whole(await until_disconnect(request.receive, generation.whole()))
    return Response(whole, headers=headers, media_type="application/json")


async def _start(body: Body, serving: Serving) -> tuple[Generation, Answers, dict[str, str]]:
    """What answers the request, and headers that say what was cut off. Raises `InvalidRequest` naming the field."""
    may_cut = body.truncate is not False
    if isinstance(body, OllamaChatRequest):
        shorten = without_oldest if may_cut else None
        return await start_shortened(serving, _chat(body, serving), "chat-", shorten)
    if body.raw or body.suffix:
        return await _start_without_template(body, serving, may_cut=may_cut)
    shorten = without_beginning if may_cut else None
    return await start_shortened(serving, _prompt(body, serving), "gen-", shorten)


def _chat(body: OllamaChatRequest, serving: Serving) -> Chat:
    passed_over: list[str] = []
    given = [_openai_message(one, f"messages[{index}]") for index, one in enumerate(body.messages or [])]
    messages = template_messages(given, passed_over)
    continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return Chat(
        messages=messages,
        tools=offered(body.tools, passed_over),
        passed_over=passed_over,
        sampling=_sampling(body, serving),
        template_kwargs={"add_generation_prompt": not continued, "continue_final_message": continued} | body.thinking,
        field_names={"prompt": "messages", **_FIELD_NAMES},
        fit_max_tokens=True,
        timeout=body.timeout_s,
    )


def _openai_message(given: OllamaMessage, where: str) -> dict[str, Any]:
    message: dict[str, Any] = {**given, "role": given["role"].lower()}
    images, content = message.pop("images", None), message.get("content") or ""
    if images and message["role"] != "tool":
        raise InvalidRequest(f"{where}.images: images are not supported, only text", param="messages")
    message["content"] = [{"type": "text", "text": content}, {"type": "image"}] if images else content
    message["tool_calls"] = [{"type": "function", **call} for call in message.get("tool_calls") or ()]
    for older, newer in (("thinking", "reasoning_content"), ("tool_name", "name")):
        if value := message.pop(older, None):
            message[newer] = value
    return message


def _prompt(body: OllamaGenerateRequest, serving: Serving) -> Chat:
    context, vocab_size = body.context or [], serving.engine.info.vocab_size
    if (largest := max(context, default=0)) >= vocab_size:
        raise InvalidRequest(f"token id {largest} is outside the vocabulary of {vocab_size} tokens", param="context")
    user = {"role": "user", "content": body.prompt or ""}
    return Chat(
        messages=[{"role": "system", "content": body.system}, user] if body.system else [user],
        prompt_prefix=context,
        sampling=_sampling(body, serving),
        template_kwargs=body.thinking,
        field_names={"messages": "prompt", **_FIELD_NAMES},
        fit_max_tokens=True,
        timeout=body.timeout_s,
    )


async def _start_without_template(
    body: OllamaGenerateRequest, serving: Serving, *, may_cut: bool
) -> tuple[Generation, Answers, dict[str, str]]:
    for name in ("system", "context", "think"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} needs the chat template, which raw and suffix leave out", param=name)
    engine, text = serving.engine, body.prompt or ""
    if may_cut and not body.suffix:
        token_ids, headers = await encode_shortened(serving, text)
    elif body.suffix:
        token_ids, headers = await engine.encode_infill(text, body.suffix, must_fit=True), {}
    else:
        token_ids, headers = await engine.encode(text, must_fit=True), {}
    with naming(_FIELD_NAMES):
        params = sampling_params(_sampling(body, serving), engine.default_sampling)
        params = fitted(params, engine.info.max_model_len - len(token_ids))
        engine.validate(token_ids, params)
    options = GenerationOptions(field_names=_FIELD_NAMES, timeout=body.timeout_s)
    generation = Generation(serving, [Prompt(token_ids, params)], options, id_prefix="gen-")
    return generation, Answers(None), headers


def _sampling(body: OllamaRequest, serving: Serving) -> dict[str, Any]:
    options = body.options or OllamaOptions()
    json_object = StructuredOutput("json_object") if body.format else None
    return {
        **options.given_sampling(serving.config, "options."),
        "max_tokens": None if options.num_predict in (-1, -2) else options.num_predict,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "structured": json_schema(body.format) if isinstance(body.format, dict) else json_object,
    }


class LineWriter(EventWriter):
    """One answer: an object for each piece and one that says how it ended, or all in one object."""

    def __init__(self, generation: Generation, answers: Answers, body: Body) -> None:
        self.generation = generation
        self.answers = answers
        self.body = body
        self.context = [*generation.prompts[0].token_ids]
        """Of prompt and answer."""
        self.with_context = isinstance(body, OllamaGenerateRequest) and not (body.raw or body.suffix)
        self.calls = Answer()
        """Tool calls so far; the last may still grow."""
        self.num_calls_sent = 0

    def whole(self, outputs: list[CompletionOutput]) -> bytes:
        [output] = outputs
        self.context += output.token_ids
        return self._object(self.answers.whole(output), output.logprobs, self._ending())

    def events(self, batch: OutputBatch) -> bytes:
        return b"".join([self._line(output) for _, output in batch])

    def end(self) -> bytes:
        return self._object(Answer(), None, self._ending()) + b"\n"

    def error(self, error: Exception) -> bytes:
        return ollama_error(error) + b"\n"

    def _line(self, output: RequestOutput) -> bytes:
        """The line for some more tokens, or nothing. Calls leave whole, when the next one begins or the answer ends."""
        self.generation.latest[0] = output
        self.context += output.token_ids
        delta = self.answers.delta(0, output)
        if delta.tool_calls:
            self.calls.add(DeltaMessage(tool_calls=delta.tool_calls))
        calls = self.calls.tool_calls[self.num_calls_sent : -1 if output.finish_reason is None else None]
        if not (delta.content or delta.reasoning or calls or output.logprobs):
            return b""
        line = self._object(Answer(delta.reasoning, delta.content, calls), output.logprobs, {"done": False})
        self.num_calls_sent += len(calls)
        return line + b"\n"

    def _object(self, answer: Answer, logprobs: list[TokenLogprobs] | None, ending: dict[str, Any]) -> bytes:
        fields = _fields(self.body, self.generation.serving, answer, self.num_calls_sent)
        if logprobs:
            fields["logprobs"] = chat_logprobs(self.generation.serving.engine.tokenizer, logprobs)["content"]
        return msgspec.json.encode(fields | ending)

    def _ending(self) -> dict[str, Any]:
        [latest] = self.generation.latest
        assert latest is not None, self.generation.id
        prepare, queue, prefill, decode = (int(seconds * 1e9) for seconds in current_phases())
        return {
            "done": True,
            **({"context": self.context} if self.with_context else {}),
            "done_reason": latest.finish_reason or "",
            "total_duration": prepare + queue + prefill + decode,
            "load_duration": prepare,
            "prompt_eval_count": latest.num_prompt_tokens,
            "prompt_eval_duration": queue + prefill,
            "eval_count": latest.num_output_tokens,
            "eval_duration": decode,
        }


def _fields(body: Body, serving: Serving, answer: Answer, num_calls_before: int = 0) -> dict[str, Any]:
    """What every object begins with, and a part of an answer or all of it; `num_calls_before` were sent already."""
    head = {"model": serving.model.id, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    thinking = {"thinking": answer.reasoning} if answer.reasoning else {}
    if isinstance(body, OllamaGenerateRequest):
        return {**head, "response": answer.content, **thinking}
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, **thinking}
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"index": index, "name": call.name, "arguments": tool_input(call.arguments)}}
            for index, call in enumerate(answer.tool_calls, num_calls_before)
        ]
    return {**head, "message": message}
