"""Fields of OpenAI's and vLLM's API that Octavo does not have.

What is accepted is honoured: such a field may be left out, be null, or hold a value that asks for nothing
(listed here). Any other value is refused by name. Fields that nobody knows are ignored and reported.
"""

from typing import Any

from configs.errors import InvalidRequest

WITHOUT_EFFECT = {"parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
"""Known fields that cannot change an answer here: hints, and options of features that are refused themselves."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # both routes
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "metadata": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # completions
    "suffix": ("",),
    # chat
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def check_unsupported(name: str, value: Any, n: int | None) -> None:
    """Raise `InvalidRequest` unless `value` asks for nothing; best_of may repeat `n`, which it then equals."""
    harmless = (n or 1,) if name == "best_of" else UNSUPPORTED[name]
    if value is not None and value not in harmless:
        raise InvalidRequest(f"{name} is not supported by this server", param=name)


def is_unsupported(name: str) -> bool:
    return name in UNSUPPORTED or name == "best_of"
