"""`InputProcessor`: texts and chats to token ids, and what can be checked before the core sees them. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.errors import ContextLengthExceeded, InvalidRequest, SettingsError
from configs.sampling import SamplingParams
from configs.settings import EngineConfig

from .bundled import locate_model
from .checkpoints import open_checkpoint
from .messages import CoreReady
from .text.chat_template import ChatTemplate
from .text.tokenizer import load_tokenizer

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class InputProcessor:
    """The text side of a checkpoint. May be used from any thread. Shared by the server's engine and by `LLM`."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `UsageError` for a checkpoint or chat template that cannot be used."""
        self.checkpoint = open_checkpoint(locate_model(config.model))
        self.tokenizer = load_tokenizer(self.checkpoint)
        template = self.tokenizer.chat_template
        if config.chat_template is not None:
            template = _read_template(Path(config.chat_template))
        self._chat_template = ChatTemplate(template, self.tokenizer.special_tokens)
        self.default_sampling: dict[str, Any] = {}
        """Fields of `SamplingParams` for requests that leave them out."""
        if config.generation_config == "auto":
            values = self.checkpoint.generation_config
            self.default_sampling = {name: values[name] for name in _DEFAULTS if values.get(name) is not None}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of the rendered chat; the template writes the special tokens itself."""
        return self.tokenizer.encode(self._chat_template.render(messages, **template_kwargs), False)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams, info: CoreReady) -> None:
        """Raise `InvalidRequest` or `ContextLengthExceeded` for what the core could not answer."""
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token_id < info.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {info.vocab_size} tokens", param="prompt"
                )
        params.check_token_ids(info.vocab_size)
        num_prompt_tokens, limit = len(prompt_token_ids), info.max_model_len
        # The last token of an output needs no place in the KV cache.
        room = min(limit, info.kv_cache_tokens + 1) - num_prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt_tokens} tokens, but with one output token the context "
                f"holds at most {num_prompt_tokens + room}",
                param="prompt",
            )
        if params.max_tokens is not None and num_prompt_tokens + params.max_tokens > limit:
            raise ContextLengthExceeded(
                f"the prompt's {num_prompt_tokens} tokens and max_tokens {params.max_tokens} make "
                f"{num_prompt_tokens + params.max_tokens}, but the context holds at most {limit}",
                param="max_tokens",
            )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"chat_template {path}: {error}") from error
