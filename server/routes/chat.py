"""POST /v1/chat/completions."""

from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from configs.settings import ServerConfig
from engine.messages import TokenLogprobs
from engine.outputs import CompletionOutput, RequestOutput
from server.answers.delta import DeltaToolCall
from server.chat import Answers, Chat, start_chat
from server.choices import respond
from server.convert.chat import chat_of
from server.generation import Generation
from server.logprobs import chat_logprobs, prompt_logprobs, spelling
from server.parsing import BodyParser, ignored_header
from server.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    FunctionCall,
    ToolCall,
)
from server.serving import serving_of


class ChatRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, config: ServerConfig) -> None:
        self.parser = BodyParser(ChatRequest, config)

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)

        async def start() -> tuple[Generation, Answers, Chat]:
            chat = chat_of(body, serving.config)
            return *await start_chat(serving, chat, "chatcmpl-"), chat

        generation, answers, chat = await serving.preparation.prepare(request, start)
        echoed = chat.messages[-1]["content"] if body.echo and body.continue_final_message else ""
        renderer = ChatRenderer(generation, answers, body, echoed)
        headers = ignored_header(parsed.ignored_fields + generation.passed_over)
        return await respond(generation, body, renderer, request, headers)


class ChatRenderer:
    """Choices of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, answers: Answers, body: ChatRequest, echoed: str) -> None:
        """`echoed`: what the content begins with."""
        self.generation = generation
        self.answers = answers
        self.body = body
        self.tokenizer = generation.serving.engine.tokenizer
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

    def whole(self, outputs: list[CompletionOutput]) -> list[ChatChoice]:
        return [self._choice(output) for output in outputs]

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        assert output.finish_reason is not None, output.index
        answer = self.answers.whole(output)
        calls = [
            ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in answer.tool_calls
        ]
        content = self.echoed + answer.content
        message = ChatMessage(
            content=None if calls and not content else content,
            reasoning_content=answer.reasoning if answer.reasoning and self.with_reasoning else UNSET,
            **self._calls(calls),
        )
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self._logprobs(output.logprobs),
            finish_reason=self._reason(
                "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
            ),
            stop_reason=UNSET if output.stop_reason is None else output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else UNSET,
        )

    def chunks(self, index: int, output: RequestOutput) -> list[ChatChunkChoice]:
        """The role once, then content, then an empty delta with the reason."""
        choices = []
        if index not in self.begun:
            self.begun.add(index)
            choices.append(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=self.echoed)))
        delta = self._delta(index, output)
        ids = output.token_ids if self.body.return_token_ids else UNSET
        if delta is not _NOTHING or output.logprobs or ids:
            logprobs = self._logprobs(output.logprobs)
            choices.append(ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, token_ids=ids))
        if output.finish_reason is not None:
            choices.append(
                ChatChunkChoice(
                    index=index,
                    delta=_NOTHING,
                    finish_reason=self._reason(self.answers.finish_reason(index, output.finish_reason)),
                    stop_reason=UNSET if output.stop_reason is None else output.stop_reason,
                )
            )
        return choices

    def _delta(self, index: int, output: RequestOutput) -> ChatDelta:
        """`_NOTHING` for text that means nothing yet, such as half a marker."""
        if self.answers.is_plain:
            return ChatDelta(content=output.text) if output.text else _NOTHING
        delta = self.answers.delta(index, output)
        reasoning = delta.reasoning if self.with_reasoning else ""
        if not (delta.content or reasoning or delta.tool_calls):
            return _NOTHING
        return ChatDelta(
            content=delta.content or UNSET,
            reasoning_content=reasoning or UNSET,
            **self._calls([_call_delta(call) for call in delta.tool_calls]),
        )

    def _calls(self, calls: list[ToolCall]) -> dict[str, Any]:
        """In the words of the request; of functions, there is one call."""
        if not self.body.functions:
            return {"tool_calls": calls or UNSET}
        return {"function_call": calls[0].function if calls and not calls[0].index else UNSET}

    def _reason(self, reason: str) -> str:
        return "function_call" if reason == "tool_calls" and self.body.functions else reason

    def _logprobs(self, positions: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        return None if positions is None else chat_logprobs(self.spell, self.tokenizer, positions)


_NOTHING = ChatDelta()


def _call_delta(call: DeltaToolCall) -> ToolCall:
    begins = call.name is not None
    kind: str | UnsetType = "function" if begins else UNSET
    function = FunctionCall(name=call.name if call.name is not None else UNSET, arguments=call.arguments)
    return ToolCall(index=call.index, id=UNSET if call.id is None else call.id, type=kind, function=function)
