"""Fields of OpenAI's and vLLM's generating routes that Octavo does not have.

What is accepted is honoured: such a field may be left out, be null, or hold a value that asks for nothing
(listed here). Any other value is refused by name. Fields that nobody knows are ignored and reported, or refused
with --strict-fields.
"""

from collections.abc import Mapping
from typing import Any

from configs.errors import InvalidRequest

WITHOUT_EFFECT = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "session_id", "user"})
"""Labels and hints."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # both routes
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    # chat
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def check_unsupported(table: Mapping[str, tuple[Any, ...]], name: str, value: Any) -> None:
    """Raise `InvalidRequest` unless `value` asks for nothing."""
    asks_for_nothing = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in table[name])
    if value is not None and not asks_for_nothing:
        raise InvalidRequest(f"{name} is not supported by this server", param=name)
