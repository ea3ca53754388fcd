"""POST /v1/chat/completions."""

from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.settings import ServerConfig
from engine.input_processor import RenderedChat
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, RequestOutput
from server.answers.delta import Answer, DeltaMessage, DeltaToolCall, ToolCall
from server.bodies import BodyRoute, ModelRequest, ParsedRequest, Unsupported
from server.chat import Answers, Chat, render, start_chat
from server.documented import streamed
from server.errors import error_statuses
from server.generation import Generation, naming
from server.logprobs import ChatLogprobs, chat_logprobs
from server.openai.base import AnswerHead, Choice, GenerationRequest, OpenAIWriter, PromptFields, finished
from server.openai.messages import Function, FunctionName, Messages, Tool, ToolChoice, template_messages
from server.sampling import NumLogprobs
from server.serving import Serving, ServingOf
from server.tools import CallMode, offered, tool_choice

router = APIRouter(route_class=BodyRoute, tags=["OpenAI"], responses=error_statuses())

_RESERVED_TEMPLATE_KWARGS = {
    *("messages", "tools", "documents", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "tokenize"),
}


class ChatPromptFields(ModelRequest):
    """What decides a chat's prompt."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    """End the prompt with the header of an assistant message (default: unless continue_final_message)."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the answer continues it."""
    chat_template: str | None = None
    """Jinja source to be used instead of the model's, if the server trusts requests with that."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    tools: list[Tool] | None = None
    mm_processor_kwargs: Annotated[Any, Unsupported(({},))] = None

    async def rendered(self, serving: Serving) -> RenderedChat:
        """The prompt as /v1/chat/completions makes it. Raises `InvalidRequest`."""
        fields = {name: getattr(self, name) for name in ChatPromptFields.model_fields}
        return await render(serving, chat_of(ChatRequest.model_construct(**fields), serving.config))

    async def prompt_of_messages(self, serving: Serving, *, special: bool) -> list[int] | None:
        """Token ids, with the tokenizer's own around them if `special`. Without messages None, and `InvalidRequest` for
        fields that only their prompt depends on."""
        if self.messages is not None:
            prompt = await self.rendered(serving)
            return await serving.engine.encode(prompt.text, add_special_tokens=True) if special else prompt.token_ids
        for name in ("tools", "continue_final_message", "chat_template", "chat_template_kwargs"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} needs messages", param=name)
        return None


class ChatRequest(ChatPromptFields, GenerationRequest):
    messages: Messages
    logprobs: bool | None = None
    """Tell the log-probabilities of the answer's tokens."""
    top_logprobs: NumLogprobs | None = None
    """And of this many likeliest ones."""
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

    audio: Annotated[Any, Unsupported()] = None
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


class AnswerParts(TypedDict, total=False):
    reasoning_content: str
    tool_calls: list[ToolCallAnswer]
    function_call: FunctionCallAnswer
    """Instead of tool_calls, where the request has functions."""


class ChatDelta(AnswerParts, total=False):
    role: Literal["assistant"]
    content: str


class AssistantAnswer(AnswerParts):
    role: Literal["assistant"]
    content: str | None
    """Null only beside tool calls."""
    refusal: None


class ChatChoice(Choice):
    message: AssistantAnswer
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletion(AnswerHead, PromptFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(AnswerHead, PromptFields):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=streamed(ChatCompletionChunk))
async def chat_completions(body: ChatRequest, request: ParsedRequest, serving: ServingOf) -> Response:
    """Answer a chat."""
    generation, answers = await request.prepare(lambda: start_chat(serving, chat_of(body, serving.config), "chatcmpl-"))
    request.ignored_fields += generation.passed_over
    echoed = template_messages(body.messages[-1:], [])[0]["content"] if body.echo else ""
    return await ChatWriter(generation, body, answers, echoed).respond(request, body.stream_interval)


def chat_of(body: ChatRequest, config: ServerConfig) -> Chat:
    """The chat that the request asks for. Raises `InvalidRequest` naming the field."""
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
        field_names={"prompt": "messages", "tools": "functions" if body.functions else "tools", **body.field_names},
        thinking_token_budget=None if body.thinking_token_budget == -1 else body.thinking_token_budget,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        passed_over=passed_over,
        **body.options(body),
    )


def _tools(body: ChatRequest, passed_over: list[str]) -> tuple[CallMode, list[dict[str, Any]]]:
    """The choice and the tools; `functions` are tools under their older name, of which a choice calls one."""
    for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, older) and getattr(body, newer):
            raise InvalidRequest(f"{older} and {newer} exclude each other", param=older)
    functions: list[Any] = [{"type": "function", "function": function} for function in body.functions or ()]
    named: Any = body.function_call
    if isinstance(named, dict):
        named = {"type": "function", **named}
    with naming({"tool_choice": "function_call"} if named else {}):
        tools = offered(body.tools or functions, passed_over, where="functions" if functions else "tools")
        return tool_choice(body.tool_choice or named, tools)


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    continued = bool(body.continue_final_message)
    opened = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    if continued and opened:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise InvalidRequest(message, param="continue_final_message")
    extra = body.chat_template_kwargs or {}
    for name in sorted(extra.keys() & _RESERVED_TEMPLATE_KWARGS):
        raise InvalidRequest(f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        extra = {"enable_thinking": body.reasoning_effort != "none", "reasoning_effort": body.reasoning_effort, **extra}
    if body.documents:
        extra = {**extra, "documents": body.documents}
    return {**extra, "add_generation_prompt": opened, "continue_final_message": continued}


class ChatWriter(OpenAIWriter[ChatRequest]):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, body: ChatRequest, answers: Answers, echoed: str) -> None:
        """`echoed`: what the content begins with."""
        super().__init__(generation, body)
        self.answers = answers
        self.with_reasoning = body.include_reasoning is not False
        self.echoed = echoed

    def choice(self, index: int, output: CompletionOutput) -> ChatChoice:
        answer = self.answers.whole(output)
        content = self.echoed + answer.content
        message: AssistantAnswer = {
            "role": "assistant",
            **self._written(answer),
            "content": None if answer.tool_calls and not content else content,
            "refusal": None,
        }
        choice: ChatChoice = {
            "index": index,
            "message": message,
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs),
            "finish_reason": None,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = output.token_ids
        has_calls = answer.tool_calls and output.finish_reason == "stop"
        return finished(choice, output, self._reason("tool_calls" if has_calls else output.finish_reason))

    def chunks(self, index: int, output: RequestOutput) -> list[ChatChunkChoice]:
        """Write the role once, then content, then an empty delta with the reason."""
        choices: list[ChatChunkChoice] = []
        if index not in self.begun:
            self.begun.add(index)
            choices.append(_chunk(index, {"role": "assistant", "content": self.echoed}))
        delta: ChatDelta  # empty for text that means nothing yet, such as half a marker
        if self.answers.is_plain:
            delta = {"content": output.text} if output.text else {}
        else:
            delta = self._written(self.answers.delta(index, output))
        if delta or output.logprobs or (self.body.return_token_ids and output.token_ids):
            choice = _chunk(index, delta, None if output.logprobs is None else self._logprobs(output.logprobs))
            if self.body.return_token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        if output.finish_reason is not None:
            reason = self._reason(self.answers.finish_reason(index, output.finish_reason))
            choices.append(finished(_chunk(index, {}), output, reason))
        return choices

    def _written(self, part: Answer | DeltaMessage) -> ChatDelta:
        """The fields of an answer or a delta that are not empty; where the request has functions, there is one call."""
        written: ChatDelta = {}
        if part.content:
            written["content"] = part.content
        if part.reasoning and self.with_reasoning:
            written["reasoning_content"] = part.reasoning
        calls = [_call(call) for call in part.tool_calls]
        if calls and not self.body.functions:
            written["tool_calls"] = calls
        elif calls and not calls[0].get("index"):
            written["function_call"] = calls[0]["function"]
        return written

    def _reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self.body.functions else reason

    def _logprobs(self, tokens: list[TokenLogprobs]) -> ChatLogprobs:
        return chat_logprobs(self.tokenizer, tokens, self.body.return_tokens_as_token_ids)


def _chunk(index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _call(call: ToolCall | DeltaToolCall) -> ToolCallAnswer:
    """A call as answers have it. Of a delta, the first piece of a call has its id and name."""
    function: FunctionCallAnswer = {"arguments": call.arguments}
    written: ToolCallAnswer = {"function": function}
    if isinstance(call, DeltaToolCall):
        written["index"] = call.index
    if call.name is not None:
        function["name"] = call.name
        written["type"] = "function"
    if call.id is not None:
        written["id"] = call.id
    return written
