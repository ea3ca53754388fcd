"""Mistral and Ministral: Llama without biases, with windows. Ministral 3 scales queries by their position beyond the
context before its extension."""

from typing import Any

from engine.checkpoints.family import Family, windowed
from engine.checkpoints.rope_values import scaling_values
from engine.checkpoints.values import MAX_CONTEXT, Values
from engine.models.config import ModelConfig

DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8}


def _ministral3(values: Values, config: ModelConfig) -> dict[str, Any]:
    """Up to that context the scale is 1, and no more than that is served."""
    scaling, key = scaling_values(values), "llama_4_scaling_beta"
    own = windowed(values, config)
    scale = values.number("attention.temperature_scale", 0.0) if values.is_gguf else scaling.number(key, 0.0)
    if not scale:
        return own
    original = config.rope.parameters.get("original_max_position_embeddings", config.max_position_embeddings)
    if values.is_gguf:
        original = values.whole("attention.temperature_length", original, most=MAX_CONTEXT)
    return own | {"context_limit": original}


FAMILIES = (
    Family(name="Mistral", models="Mistral 7B, Nemo, Small", defaults=DEFAULTS, read=windowed),
    Family(name="Ministral", models="Ministral 8B", defaults=DEFAULTS, read=windowed),
    Family(
        name="Ministral3",
        models="Ministral 3 3B, 8B, 14B (text), up to 16,384 tokens",
        gguf=("mistral3",),
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        read=_ministral3,
        gguf_is_interleaved=True,
    ),
)
