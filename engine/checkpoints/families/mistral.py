"""Mistral and Ministral: Llama without biases, with windows."""

from engine.checkpoints.family import Family, windowed

DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8}

FAMILIES = (
    Family(name="Mistral", models="Mistral 7B, Nemo, Small", defaults=DEFAULTS, read=windowed),
    Family(name="Ministral", models="Ministral 8B", defaults=DEFAULTS, read=windowed),
)
