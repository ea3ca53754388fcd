"""POST /v1/chat/completions."""

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from engine.outputs import CompletionOutput, RequestOutput
from server.convert import chat_messages, sampling_params, template_kwargs
from server.generation import Generation
from server.logprobs import chat_logprobs
from server.parsing import BodyParser
from server.protocol.chat import ChatChoice, ChatChunkChoice, ChatDelta, ChatMessage, ChatRequest
from server.serving import TokenizerFace, check_number_of_choices, serving_of


class ChatRoute:
    """Called with a request; raises `RequestError`."""

    def __init__(self, max_body_bytes: int) -> None:
        self.parser = BodyParser(ChatRequest, max_body_bytes)

    async def __call__(self, request: Request) -> Response:
        serving = serving_of(request)
        serving.check_alive()
        parsed = await self.parser.parse(request)
        body = parsed.body
        serving.check_model(body.model)
        engine = serving.engine
        params = sampling_params(body, engine.default_sampling, serving.config)
        check_number_of_choices(1, params.n, serving.config)
        token_ids = await engine.encode_chat(chat_messages(body.messages), **template_kwargs(body))
        engine.validate(token_ids, params)
        generation = Generation(serving, body, [(token_ids, params)], ChatRenderer(engine.tokenizer))
        return await generation.respond(request, parsed.ignored_fields)


class ChatRenderer:
    """Choices of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: TokenizerFace) -> None:
        self.tokenizer = tokenizer
        self.begun: set[int] = set()
        """Choices whose role was sent."""

    def whole(self, output: CompletionOutput) -> ChatChoice:
        assert output.finish_reason is not None, output
        return ChatChoice(
            index=output.index,
            message=ChatMessage(content=output.text),
            logprobs=None if output.logprobs is None else chat_logprobs(self.tokenizer, output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=UNSET if output.stop_reason is None else output.stop_reason,
        )

    def chunks(self, index: int, output: RequestOutput) -> list[ChatChunkChoice]:
        """The role once, then content, then an empty delta with the reason."""
        choices = []
        if index not in self.begun:
            self.begun.add(index)
            choices.append(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
        if output.text or output.logprobs:
            logprobs = None if output.logprobs is None else chat_logprobs(self.tokenizer, output.logprobs)
            choices.append(ChatChunkChoice(index=index, delta=ChatDelta(content=output.text), logprobs=logprobs))
        if output.finish_reason is not None:
            reason = UNSET if output.stop_reason is None else output.stop_reason
            choices.append(
                ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=output.finish_reason, stop_reason=reason)
            )
        return choices
