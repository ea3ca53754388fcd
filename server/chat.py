"""One conversation to answer, in no protocol's words: what the chat-like routes turn their bodies into."""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.errors import InvalidRequest
from configs.sampling import Reasoning, StructuredOutput
from engine.input_processor import RenderedChat
from engine.outputs import CompletionOutput, RequestOutput
from server.answers.delta import Answer, DeltaMessage
from server.answers.grammar import answer_grammar
from server.answers.parser import AnswerParser
from server.answers.styles import AnswerStyle, style_of
from server.generation import Generation, GenerationOptions, Prompt, naming
from server.sampling import fitted, sampling_params, truncated
from server.serving import Serving
from server.tools import CallMode, Tools


@dataclass(frozen=True, kw_only=True)
class Chat(GenerationOptions):
    messages: list[dict[str, Any]]
    """As chat templates take them: content a string, arguments of tool calls an object."""
    sampling: dict[str, Any]
    """Fields of `SamplingParams` that the request gives."""
    tools: Tools = field(default_factory=list)
    tool_choice: CallMode = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    """Instead of the model's."""
    prompt_prefix: list[int] = field(default_factory=list)
    """Token ids before the rendered chat, which then goes without its beginning-of-sequence token."""
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    fit_max_tokens: bool = False
    """A max_tokens that is more than the context holds means as many as it holds, and is not refused."""
    passed_over: list[str] = field(default_factory=list)


class Answers:
    """What the model's text means, choice by choice: reasoning, content and tool calls."""

    def __init__(self, new_parser: Callable[[], AnswerParser] | None) -> None:
        """Without parsers, all text is content."""
        self.is_plain = new_parser is None
        self._parsers: defaultdict[int, AnswerParser] = defaultdict(new_parser)

    def delta(self, index: int, output: RequestOutput) -> DeltaMessage:
        """What is new in a choice with `output`."""
        if self.is_plain:
            return DeltaMessage(content=output.text)
        return self._parsers[index].push(output.text, ended=output.finish_reason is not None, cut=_is_cut(output))

    def whole(self, output: CompletionOutput) -> Answer:
        if self.is_plain:
            return Answer(content=output.text)
        return self._parsers[output.index].parse(output.text, cut=_is_cut(output))

    def finish_reason(self, index: int, reason: str) -> str:
        """The reason why a streamed choice ended: `tool_calls` where it ended with calls."""
        parser = self._parsers.get(index)
        return "tool_calls" if reason == "stop" and parser is not None and parser.num_calls else reason


def _is_cut(output: RequestOutput | CompletionOutput) -> bool:
    return output.finish_reason not in (None, "stop")


MAX_TOOLS = 256
"""OpenAI allows 128."""
_SYSTEM_ROLES = ("system", "developer")


async def start_chat(serving: Serving, chat: Chat, id_prefix: str) -> tuple[Generation, Answers]:
    """The generation, which does not run yet, and what its text means.

    Raises `InvalidRequest` for what the template, the grammar or the context refuse.
    """
    if chat.sampling.get("structured") is None:  # the grammar, if there is one, is that of the tools
        field = chat.field_names.get("tools", "tools")
        chat = dataclasses.replace(chat, field_names={**chat.field_names, "structured": field})
    with naming(chat.field_names):
        if len(chat.tools) > MAX_TOOLS:
            raise InvalidRequest(f"a request may have {MAX_TOOLS} tools; got {len(chat.tools)}", param="tools")
        rendered = await render(serving, chat, must_fit=chat.truncate_prompt_tokens is None)
        reading = _Reading(serving, chat, rendered.text)
        prompt = await _prompt(serving, chat, await reading.sampling(), rendered)
    answers = Answers(reading.new_parser if chat.tools or reading.reasoning else None)
    return Generation(serving, [prompt], chat, id_prefix=id_prefix), answers


async def _prompt(serving: Serving, chat: Chat, sampling: dict[str, Any], rendered: RenderedChat) -> Prompt:
    engine = serving.engine
    limit = engine.info.max_model_len
    params = sampling_params(sampling, engine.default_sampling)
    if chat.beam_length_penalty is not None and (params.structured or params.thinking):
        raise InvalidRequest("beam search knows no tool choice and no thinking budget", param="use_beam_search")
    serving.check_number_of_choices(1, params.n)
    token_ids = rendered.token_ids
    if chat.prompt_prefix:
        begins = token_ids[:1] == [engine.tokenizer.bos_token_id]
        token_ids = [*chat.prompt_prefix, *token_ids[begins:]]
    room = limit - (params.max_tokens or 1)
    token_ids = truncated(token_ids, chat.truncate_prompt_tokens, room, chat.truncation_side)
    if chat.fit_max_tokens:
        params = fitted(params, limit - len(token_ids))
    engine.validate(token_ids, params)
    return Prompt(token_ids, params)


async def render(serving: Serving, chat: Chat, *, must_fit: bool = False) -> RenderedChat:
    """The chat's prompt. Raises `InvalidRequest` in the template's words where it refuses; see `AsyncInputs.encode`."""
    style = _style_of(serving, chat)
    given = {"tools": chat.tools if style.knows_tools else None, "chat_template": chat.chat_template}
    kwargs = {name: value for name, value in given.items() if value} | chat.template_kwargs
    messages = style.messages(chat.messages, chat.tools)
    try:
        return await serving.engine.render_chat(messages, must_fit, **kwargs)
    except InvalidRequest as error:  # some templates take one system message, at the beginning
        joined = _with_one_system_message(messages)
        if error.param != "messages" or joined == [*messages]:
            raise
        return await serving.engine.render_chat(joined, must_fit, **kwargs)


def _with_one_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with all system messages joined to one, before the others."""
    system = [message for message in messages if message["role"] in _SYSTEM_ROLES]
    content = "\n\n".join(message["content"] for message in system if message["content"])
    others = [message for message in messages if message["role"] not in _SYSTEM_ROLES]
    return [{**system[0], "content": content}, *others] if system else others


def _style_of(serving: Serving, chat: Chat) -> AnswerStyle:
    own = serving.engine.tool_template if chat.tools else serving.engine.chat_template
    template = chat.chat_template or own or ""
    return style_of(template, serving.config.tool_call_parser, serving.config.reasoning_parser)


class _Reading:
    """How one chat's answers are to be read, and so how they may be written."""

    def __init__(self, serving: Serving, chat: Chat, prompt: str) -> None:
        self.chat = chat
        self.engine = serving.engine
        self.style = _style_of(serving, chat)
        self.reasoning = reasoning = self.style.reasoning
        self.starts_inside = reasoning is not None and reasoning.starts_inside(prompt)
        if reasoning is None:
            return
        is_over = reasoning.is_over(prompt)
        if chat.template_kwargs.get("continue_final_message"):
            begun = chat.messages[-1]["content"]
            self.starts_inside |= reasoning.opening in begun and reasoning.closing not in begun
            is_over = not self.starts_inside
        if is_over:
            self.reasoning = None

    def new_parser(self) -> AnswerParser:
        tools, only_calls = self.chat.tools, self.chat.tool_choice != "auto"
        functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        style = self.style.tools if tools else None
        return AnswerParser(self.reasoning, style, functions, starts_inside=self.starts_inside, only_calls=only_calls)

    async def sampling(self) -> dict[str, Any]:
        """The request's fields, with the answer's grammar, the special tokens that its parser has to see, and what
        bounds its reasoning."""
        chat, reasoning = self.chat, self.reasoning
        # the grammar of many tools takes a while to write
        structured = await asyncio.to_thread(self._grammar) if chat.tools else self._grammar()
        markers = (*(self.style.tools.markers if chat.tools else ()), *(reasoning or ()))
        ids = map(self.engine.tokenizer.special_id, markers)
        shown = tuple(token_id for token_id in ids if token_id is not None)
        fields = {**chat.sampling, "shown_token_ids": shown, "structured": structured}
        if reasoning is None:
            return fields
        around = Reasoning(reasoning.closing, "" if self.starts_inside else reasoning.opening)
        if chat.thinking_token_budget is not None:
            end = reasoning.end(chat.chat_template or self.engine.chat_template or "")
            fields["thinking"] = await self.engine.thinking_budget(chat.thinking_token_budget, around, end)
        return {**fields, "reasoning": around}

    def _grammar(self) -> StructuredOutput | None:
        chat = self.chat
        is_one = chat.tool_choice == "one" or (chat.tool_choice == "required" and self.style.takes_one_call)
        return answer_grammar(
            self.style.tools,
            chat.tools,
            is_required=chat.tool_choice != "auto",
            parallel=chat.parallel_tool_calls and not is_one,
            reasoning=self.reasoning,
            starts_inside=self.starts_inside,
            content=chat.sampling.get("structured"),
            passed_over=chat.passed_over,
        )
