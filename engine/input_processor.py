"""`InputProcessor`: texts and chats to token ids, and what can be checked before the core sees them. No torch."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from configs.errors import CheckpointError, ContextLengthExceeded, InvalidRequest, SettingsError
from configs.sampling import Reasoning, SamplingParams, ThinkingBudget
from configs.settings import EngineConfig

from .bundled import locate_model
from .checkpoints import open_checkpoint
from .checkpoints.hf_folder import SAMPLING_DEFAULTS
from .messages import CoreReady
from .text.chat_template import ChatTemplate
from .text.infill import infill_prompt
from .text.tokenizer import load_tokenizer
from .text.word_tokens import marker_parts, word_tokens

logger = logging.getLogger("octavo.engine")

MAX_TEMPLATE = 2**18
"""Characters of a request's chat template; compiling takes a second for so many."""


class RenderedChat(NamedTuple):
    text: str
    token_ids: list[int]


class InputProcessor:
    """The text side of a checkpoint. May be used from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `UsageError` for a checkpoint or chat template that cannot be used."""
        self.model = config.model
        self.checkpoint = open_checkpoint(locate_model(config.model))
        self.tokenizer = load_tokenizer(self.checkpoint)
        if config.chat_template is not None:
            template = _read_template(Path(config.chat_template))
            self._chat_template = self._tool_template = ChatTemplate(template, self.tokenizer.special_tokens)
        else:
            self._chat_template = self._tool_template = self._own_template("default")
            if "tool_use" in self.checkpoint.chat_templates:
                self._tool_template = self._own_template("tool_use")
        self._template_of = lru_cache(maxsize=16)(self._compile_template)
        self._sequences_of = lru_cache(maxsize=16)(self._encode_words)
        self._parts_of = lru_cache(maxsize=16)(self._find_parts)
        self.default_pooling = self.checkpoint.pooling
        self.default_sampling: dict[str, Any] = {}
        """Fields of `SamplingParams` for requests that leave them out."""
        if config.generation_config == "auto":
            values = self.checkpoint.generation_config
            self.default_sampling = {name: values[name] for name in SAMPLING_DEFAULTS if values.get(name) is not None}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def render(
        self, messages: Sequence[dict[str, Any]], /, *, chat_template: str | None = None, **template_kwargs: Any
    ) -> str:
        """The chat as the template renders it, or `chat_template` instead; it writes the special tokens itself.

        Raises `InvalidRequest` when there is no template, or it refuses.
        """
        own = self._tool_template if template_kwargs.get("tools") else self._chat_template
        template = own if chat_template is None else self._template_of(chat_template)
        return template.render(messages, **template_kwargs)

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        return self._chat_template.source

    @property
    def tool_template(self) -> str | None:
        """The source of the template for chats with tools."""
        return self._tool_template.source

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Token ids that ask for what comes between. Raises `InvalidRequest` for a model without tokens for that."""
        return infill_prompt(self.tokenizer, prefix, suffix)

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """The parameters as the core takes them: `bad_words` as `bad_sequences`, a thinking budget with its texts."""
        changes: dict[str, Any] = {}
        if params.bad_words:
            changes |= {"bad_words": (), "bad_sequences": params.bad_sequences + self._sequences_of(params.bad_words)}
        if params.thinking is not None and not params.thinking.closing:
            budget = params.thinking
            closing, opening = (
                b"".join(map(self.tokenizer.token_bytes, ids)).decode(errors="replace").strip()
                for ids in (budget.end, budget.begin)
            )
            texts = {"closing": closing, "opening": opening, "spellings": self._parts_of(closing, opening)}
            changes["thinking"] = msgspec.structs.replace(budget, **texts)
        return msgspec.structs.replace(params, **changes) if changes else params

    def thinking_budget(self, max_tokens: int, reasoning: Reasoning, end: str) -> ThinkingBudget:
        """A budget of the part between two markers; `end` is the closing one as it is written when it is forced.

        The first one with these markers takes a part of a second.
        """
        closing, opening = reasoning.closing, reasoning.opening
        ids, spellings = tuple(self.encode(end, add_special_tokens=False)), self._parts_of(closing, opening)
        return ThinkingBudget(max_tokens, ids, closing=closing, opening=opening, spellings=spellings)

    def _find_parts(self, *markers: str) -> dict[int, str]:
        """The tokens that a marker, with what may stand before and behind it, can be made of."""
        may_be_part = marker_parts(markers)
        texts = ((token_id, raw.decode(errors="replace")) for token_id, raw in self.tokenizer.spellings())
        return {token_id: text for token_id, text in texts if may_be_part(text)}

    def _encode_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple({ids: None for word in words for ids in sorted(word_tokens(self.tokenizer, word))})

    def check_length(self, text: str, info: CoreReady) -> None:
        """Raise `ContextLengthExceeded` for a prompt that has too many characters to fit, however it is encoded."""
        most = min(info.max_model_len, info.kv_cache_tokens + 1)
        if len(text) > most and (least := self.tokenizer.bound.least_tokens(text)) > most:
            raise ContextLengthExceeded(
                f"the prompt is too long: its {len(text)} characters are at least {least} tokens; "
                f"this model's maximum context length is {most} tokens",
                param="prompt",
            )

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams, info: CoreReady) -> None:
        """Raise `InvalidRequest` or `ContextLengthExceeded` for what the core could not answer.

        Clients tell a context that is exceeded by the words "prompt is too long" and "maximum context length is".
        """
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not self.checkpoint.config.has_head and (params.max_tokens != 0 or params.prompt_logprobs is not None):
            raise InvalidRequest("the model has no head that predicts tokens; it can only embed", param="model")
        for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token_id < info.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {info.vocab_size} tokens", param="prompt"
                )
        params.check_token_ids(info.vocab_size)
        num_prompt_tokens, limit = len(prompt_token_ids), info.max_model_len
        # The last token of an output needs no place in the KV cache.
        num_output = 0 if params.max_tokens == 0 else 1
        most = min(limit, info.kv_cache_tokens + num_output)
        if num_prompt_tokens + num_output > most:
            raise ContextLengthExceeded(
                f"the prompt is too long: it has {num_prompt_tokens} tokens{', an output at least one' * num_output}; "
                f"this model's maximum context length is {most} tokens",
                param="prompt",
            )
        if params.max_tokens is not None and num_prompt_tokens + params.max_tokens > limit:
            raise ContextLengthExceeded(
                f"the prompt's {num_prompt_tokens} tokens and an output of {params.max_tokens} make "
                f"{num_prompt_tokens + params.max_tokens}, but this model's maximum context length is {limit} tokens",
                param="max_tokens",
            )

    def _own_template(self, name: str) -> ChatTemplate:
        """The checkpoint's, which keeps nothing but chats from being answered when it is malformed."""
        try:
            return ChatTemplate(self.checkpoint.chat_templates.get(name), self.tokenizer.special_tokens)
        except CheckpointError as error:
            lack = f"the model's chat template cannot be used ({error})"
            logger.warning("%s: %s", self.checkpoint.path, lack)
            return ChatTemplate(None, {}, lack)

    def _compile_template(self, source: str) -> ChatTemplate:
        """A request's own template."""
        if len(source) > MAX_TEMPLATE:
            raise InvalidRequest(f"a template may have {MAX_TEMPLATE} characters", param="chat_template")
        try:
            return ChatTemplate(source, self.tokenizer.special_tokens)
        except CheckpointError as error:
            raise InvalidRequest(str(error), param="chat_template") from error


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"chat_template {path}: {error}") from error
