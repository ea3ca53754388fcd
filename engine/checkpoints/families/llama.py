"""Llama, and what is Llama but for its name."""

from typing import Any

from engine.checkpoints.family import Family, biases, windowed
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig


def _llama(values: Values, config: ModelConfig) -> dict[str, Any]:
    """transformers' Llama has no window; GGUF's, which is Mistral's architecture as well, may have one."""
    own_windows = windowed(values, config) if values.is_gguf else {}
    return biases(values) | {"mlp_bias": values.flag("mlp_bias")} | own_windows


FAMILIES = (
    Family(
        name="Llama",
        models="Llama 1 to 3.3, SmolLM 1 and 2, TinyLlama, Yi, DeepSeek R1 Distill Llama",
        gguf=("llama",),
        defaults={"max_position_embeddings": 2048},
        read=_llama,
        gguf_is_interleaved=True,
    ),
)
