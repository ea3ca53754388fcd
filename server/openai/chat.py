"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.settings import ServerConfig
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, RequestOutput
from server.answers.delta import DeltaToolCall
from server.bodies import BodyRoute, ParsedRequest, Unsupported
from server.chat import Answers, Chat, start_chat
from server.documented import streamed
from server.errors import error_statuses
from server.generation import Generation, naming
from server.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs, spelling
from server.openai.base import AnswerHead, GenerationRequest, OpenAIWriter, StopReason
from server.openai.messages import Function, FunctionName, Messages, Tool, ToolChoice, template_messages
from server.sampling import NumLogprobs, beam_length_penalty
from server.serving import ServingOf
from server.tools import as_given, offered, tool_choice

router = APIRouter(route_class=BodyRoute, responses=error_statuses())

_RESERVED_TEMPLATE_KWARGS = {
    *("messages", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "tokenize"),
}


class ChatRequest(GenerationRequest):
    messages: Messages
    logprobs: bool | None = None
    """Tell the log-probabilities of the answer's tokens."""
    top_logprobs: NumLogprobs | None = None
    """And of this many likeliest ones."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one tool call."""
    functions: list[Function] | None = None
    """The older name of tools; the answer has a function_call."""
    function_call: Literal["auto", "none"] | FunctionName | None = None
    """The older name of tool_choice."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    reasoning_effort: str | None = None
    """For the chat template; `none` also tells it not to open a reasoning part."""
    thinking_token_budget: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    """Most tokens of the reasoning part; -1 for no bound."""
    documents: list[dict[str, Any]] | None = None
    """For templates that print documents."""
    add_generation_prompt: bool | None = None
    """End the prompt with the header of an assistant message (default: unless continue_final_message)."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the answer continues it."""
    chat_template: str | None = None
    """Jinja source to be used instead of the model's, if the server trusts requests with that."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""

    audio: Annotated[Any, Unsupported()] = None
    mm_processor_kwargs: Annotated[Any, Unsupported(({},))] = None
    modalities: Annotated[Any, Unsupported((["text"],))] = None
    moderation: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None


class FunctionCallAnswer(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallAnswer(TypedDict):
    """Of a message; and of a delta, where the index tells which call it belongs to."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallAnswer


class AssistantAnswer(TypedDict):
    role: Literal["assistant"]
    content: str | None
    """Null only beside tool calls."""
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallAnswer]]
    function_call: NotRequired[FunctionCallAnswer]
    """Instead of tool_calls, where the request has functions."""


class ChatChoice(TypedDict):
    index: int
    message: AssistantAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[StopReason]
    token_ids: NotRequired[list[int]]


class ChatDelta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallAnswer]]
    function_call: NotRequired[FunctionCallAnswer]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[StopReason]
    token_ids: NotRequired[list[int]]


class _AboutPrompt(AnswerHead):
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatCompletion(_AboutPrompt):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(_AboutPrompt):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=streamed(ChatCompletionChunk))
async def chat_completions(body: ChatRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a chat."""

    async def start() -> tuple[Generation, Answers, Chat]:
        chat = chat_of(body, serving.config)
        return *await start_chat(serving, chat, "chatcmpl-"), chat

    generation, answers, chat = await request.prepare(start)
    request.ignored_fields += generation.passed_over
    echoed = chat.messages[-1]["content"] if body.echo and body.continue_final_message else ""
    return await ChatWriter(generation, body, answers, echoed).respond(request)


def chat_of(body: ChatRequest, config: ServerConfig) -> Chat:
    """Raises `InvalidRequest` naming the field."""
    if body.chat_template is not None and not config.trust_request_chat_template:
        message = "chat_template in requests needs a server with --trust-request-chat-template"
        raise InvalidRequest(message, param="chat_template")
    if body.echo and not body.continue_final_message:
        raise InvalidRequest("echo of a chat needs continue_final_message", param="echo")
    passed_over: list[str] = []
    choice, tools = _tools(body, passed_over)
    sampling = body.given_sampling(config)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    sampling["logprobs"] = body.top_logprobs or 0 if body.logprobs else None
    return Chat(
        messages=template_messages(body.messages, passed_over),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False and not body.functions,
        chat_template=body.chat_template,
        template_kwargs=_template_kwargs(body),
        sampling=sampling,
        field_names={"prompt": "messages", **body.field_names},
        beam_length_penalty=beam_length_penalty(body, body.stream),
        thinking_token_budget=None if body.thinking_token_budget == -1 else body.thinking_token_budget,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        request_id=body.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=body.timeout_s,
        passed_over=passed_over,
    )


def _tools(body: ChatRequest, passed_over: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """The choice and the tools; `functions` are tools under their older name, of which a choice calls one."""
    for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, older) and getattr(body, newer):
            raise InvalidRequest(f"{older} and {newer} exclude each other", param=older)
    functions: list[Any] = [{"type": "function", "function": function} for function in body.functions or ()]
    named: Any = body.function_call
    if isinstance(named, dict):
        named = {"type": "function", "function": named}
    with naming({"tools": "functions", "tool_choice": "function_call"} if functions or named else {}):
        given: Any = body.tools or functions
        tools = offered(given, as_given, passed_over, where="functions" if functions else "tools")
        choice: Any = body.tool_choice or named
        return tool_choice(choice, tools)


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    continued = bool(body.continue_final_message)
    opened = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    if continued and opened:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise InvalidRequest(message, param="continue_final_message")
    extra = body.chat_template_kwargs or {}
    for name in extra.keys() & _RESERVED_TEMPLATE_KWARGS:
        raise InvalidRequest(f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        extra = {"enable_thinking": body.reasoning_effort != "none", "reasoning_effort": body.reasoning_effort, **extra}
    if body.documents:
        extra = {**extra, "documents": body.documents}
    return {**extra, "add_generation_prompt": opened, "continue_final_message": continued}


_NOTHING: ChatDelta = {}


class ChatWriter(OpenAIWriter[ChatRequest]):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, body: ChatRequest, answers: Answers, echoed: str) -> None:
        """`echoed`: what the content begins with."""
        super().__init__(generation, body)
        self.answers = answers
        self.spell = spelling(self.tokenizer, body.return_tokens_as_token_ids)
        self.with_reasoning = body.include_reasoning is not False
        self.echoed = echoed
        self.begun: set[int] = set()
        """Choices whose role was sent."""

    def beside_choices(self, output: CompletionOutput | RequestOutput) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.generation.prompts[0].token_ids
        if (count := self.body.prompt_logprobs) is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.tokenizer, output.prompt_logprobs or [], count)
        return fields

    def choices(self, outputs: list[CompletionOutput]) -> list[ChatChoice]:
        return [self._choice(output) for output in outputs]

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        assert output.finish_reason is not None, output.index
        answer = self.answers.whole(output)
        calls: list[ToolCallAnswer] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
        content = self.echoed + answer.content
        message: AssistantAnswer = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        message |= self._calls(calls)
        if answer.reasoning and self.with_reasoning:
            message["reasoning_content"] = answer.reasoning
        reason = "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
        choice: ChatChoice = {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": self._reason(reason),
        }
        if output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def chunks(self, index: int, output: RequestOutput) -> list[ChatChunkChoice]:
        """The role once, then content, then an empty delta with the reason."""
        choices: list[ChatChunkChoice] = []
        if index not in self.begun:
            self.begun.add(index)
            choices.append(_chunk(index, {"role": "assistant", "content": self.echoed}))
        delta = self._delta(index, output)
        if delta or output.logprobs or (self.body.return_token_ids and output.token_ids):
            choice = _chunk(index, delta, self._logprobs(output.logprobs))
            if self.body.return_token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        if output.finish_reason is not None:
            reason = self._reason(self.answers.finish_reason(index, output.finish_reason))
            choice = _chunk(index, _NOTHING, finish_reason=reason)
            if output.stop_reason is not None:
                choice["stop_reason"] = output.stop_reason
            choices.append(choice)
        return choices

    def _delta(self, index: int, output: RequestOutput) -> ChatDelta:
        """Empty for text that means nothing yet, such as half a marker."""
        if self.answers.is_plain:
            return {"content": output.text} if output.text else _NOTHING
        delta = self.answers.delta(index, output)
        written: ChatDelta = {}
        if delta.content:
            written["content"] = delta.content
        if delta.reasoning and self.with_reasoning:
            written["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            written |= self._calls([_call_delta(call) for call in delta.tool_calls])
        return written

    def _calls(self, calls: list[ToolCallAnswer]) -> Any:
        """In the words of the request; of functions, there is one call."""
        if not calls:
            return {}
        if not self.body.functions:
            return {"tool_calls": calls}
        return {} if calls[0].get("index") else {"function_call": calls[0]["function"]}

    def _reason(self, reason: str) -> str:
        return "function_call" if reason == "tool_calls" and self.body.functions else reason

    def _logprobs(self, positions: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        return None if positions is None else chat_logprobs(self.spell, self.tokenizer, positions)


def _chunk(
    index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _call_delta(call: DeltaToolCall) -> ToolCallAnswer:
    function: FunctionCallAnswer = {"arguments": call.arguments}
    written: ToolCallAnswer = {"index": call.index, "function": function}
    if call.name is not None:
        function["name"] = call.name
        written["type"] = "function"
    if call.id is not None:
        written["id"] = call.id
    return written
