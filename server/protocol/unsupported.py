"""Fields of OpenAI's and vLLM's generating routes that Octavo does not have.

What is accepted is honoured: such a field may be left out, be null, or hold a value that asks for nothing
(listed here). Any other value is refused by name, or, where it is a hint that changes no answer, ignored and reported.
Fields that nobody knows are ignored and reported, or refused with --strict-fields.
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
    "spaces_between_special_tokens": (True,),
    # chat
    "audio": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
}


HINTS: dict[str, tuple[Any, ...]] = {
    "prediction": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}
"""What asks for speed, price or style that are not to be had here."""


def asks_for_nothing(table: Mapping[str, tuple[Any, ...]], name: str, value: Any) -> bool:
    neutral = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in table[name])
    return value is None or any(neutral)


def check_unsupported(table: Mapping[str, tuple[Any, ...]], name: str, value: Any) -> None:
    """Raise `InvalidRequest` unless `value` asks for nothing."""
    if not asks_for_nothing(table, name, value):
        raise InvalidRequest(f"{name} is not supported by this server", param=name)
