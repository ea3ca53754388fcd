"""Bodies of Ollama's /api/chat and /api/generate, and what the engine takes of them."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from configs.errors import InvalidRequest
from configs.sampling import StructuredOutput
from server.bodies import Hint, ModelRequest, Unsupported
from server.chat import Chat, render
from server.generation import Prompt, naming
from server.openai.base import Timeout
from server.openai.messages import Content, Tool, ToolCall, template_messages
from server.sampling import AlsoFloat, Integer, LlamaSampling, NumLogprobs, Text, TokenId, fitted, sampling_params
from server.serving import Serving
from server.shortening import encode_part, room_for_prompt
from server.structured import STRICT, json_schema
from server.tools import as_given, offered

FIELD_NAMES = {"max_tokens": "options", "structured": "format"}


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
    top_logprobs: NumLogprobs | None = None
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
        """What the template is to know."""
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {} if self.think is None else {"enable_thinking": bool(self.think), **effort}

    @property
    def unknown_fields(self) -> list[str]:
        return super().unknown_fields + self._of_options("unknown_fields")

    @property
    def ignored_fields(self) -> list[str]:
        return [*dict.fromkeys(super().ignored_fields + self._of_options("ignored_fields"))]

    def _of_options(self, which: str) -> list[str]:
        return [f"options.{name}" for name in getattr(self.options, which, ())]


@STRICT
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

    @property
    def has_template(self) -> bool:
        """Whether the chat template stands around the prompt."""
        return not (self.raw or self.suffix)


def chat_of(body: OllamaChatRequest | OllamaGenerateRequest, serving: Serving) -> Chat:
    """Of a body with messages, or with a prompt for the chat template. Raises `InvalidRequest` naming the field."""
    return Chat(
        **(_conversation(body) if isinstance(body, OllamaChatRequest) else _prompt(body, serving)),
        sampling=sampling_of(body, serving),
        fit_max_tokens=True,
        timeout=body.timeout_s,
    )


def _conversation(body: OllamaChatRequest) -> dict[str, Any]:
    passed_over: list[str] = []
    given = [_openai_message(one, f"messages[{index}]") for index, one in enumerate(body.messages or [])]
    messages = template_messages(given, passed_over)
    continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    kwargs = {"add_generation_prompt": not continued, "continue_final_message": continued}
    tools: Any = body.tools
    return {
        "messages": messages,
        "tools": offered(tools, as_given, passed_over),
        "passed_over": passed_over,
        "template_kwargs": kwargs | body.thinking,
        "field_names": {"prompt": "messages", **FIELD_NAMES},
    }


def _prompt(body: OllamaGenerateRequest, serving: Serving) -> dict[str, Any]:
    context, vocab_size = body.context or [], serving.engine.info.vocab_size
    if (largest := max(context, default=0)) >= vocab_size:
        raise InvalidRequest(f"token id {largest} is outside the vocabulary of {vocab_size} tokens", param="context")
    user = {"role": "user", "content": body.prompt or ""}
    return {
        "messages": [{"role": "system", "content": body.system}, user] if body.system else [user],
        "prompt_prefix": context,
        "template_kwargs": body.thinking,
        "field_names": FIELD_NAMES,
    }


async def without_beginning(chat: Chat, serving: Serving) -> Chat:
    """The chat with as much of the end of `context` and prompt as leaves room for an answer; as it is where the
    template alone is too long."""
    *others, user = chat.messages
    without_prompt = dataclasses.replace(chat, messages=[*others, {**user, "content": ""}])
    around = await render(serving, without_prompt, must_fit=True)
    room = room_for_prompt(serving) - len(around.token_ids)
    if room < 1:
        return chat
    token_ids = await encode_part(serving, user["content"], room, add_special_tokens=False)
    if len(token_ids) > room:
        token_ids = token_ids[-room:]
        user = {**user, "content": await serving.engine.decode(token_ids, skip_special_tokens=False)}
    num_context = min(room - len(token_ids), len(chat.prompt_prefix))
    prefix = chat.prompt_prefix[len(chat.prompt_prefix) - num_context :]
    return dataclasses.replace(chat, messages=[*others, user], prompt_prefix=prefix)


async def plain_prompt(body: OllamaGenerateRequest, serving: Serving, *, is_cut: bool) -> Prompt:
    """Of a prompt without chat template: raw, or with a suffix. If `is_cut`, its end that leaves room for an answer,
    behind the token that begins all texts. Raises `InvalidRequest`."""
    for name in ("system", "context", "think"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} needs the chat template, which raw and suffix leave out", param=name)
    engine, text, room = serving.engine, body.prompt or "", room_for_prompt(serving)
    if body.suffix:
        token_ids = await engine.encode_infill(text, body.suffix, must_fit=True)
    elif not is_cut:
        token_ids = await engine.encode(text, must_fit=True)
    elif len(token_ids := await encode_part(serving, text, room)) > room:
        begins = token_ids[:1] == [engine.tokenizer.bos_token_id]
        token_ids = token_ids[:begins] + token_ids[begins - room :]
    with naming(FIELD_NAMES):
        params = sampling_params(sampling_of(body, serving), engine.default_sampling)
        params = fitted(params, engine.info.max_model_len - len(token_ids))
        engine.validate(token_ids, params)
    return Prompt(token_ids, params)


def sampling_of(body: OllamaRequest, serving: Serving) -> dict[str, Any]:
    """Fields of `SamplingParams`. Raises `InvalidRequest` naming the field."""
    options = body.options or OllamaOptions()
    num_predict = options.num_predict or -1
    json_object = StructuredOutput("json_object") if body.format else None
    return {
        **options.given_sampling(serving.config, "options."),
        "max_tokens": num_predict if num_predict > 0 else None,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "structured": json_schema(body.format) if isinstance(body.format, dict) else json_object,
    }


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
