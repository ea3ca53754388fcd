"""Qwen 2 and 3: biases on q, k and v, or norms of q and k."""

from typing import Any

from engine.checkpoints.family import LLAMA_NAMES, QK_NORM, Family, biases, layer_types, windowed, windows
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def _windows(values: Values, config: ModelConfig) -> dict[str, Any]:
    """Layers from `max_window_layers` on have a window, where it is used at all; in GGUF it is there to be used."""
    if values.is_gguf:
        return windowed(values, config)
    if not values.flag("use_sliding_window") or "sliding_window" not in values:
        return {}
    first = values.whole("max_window_layers", least=0)
    by_place = ["sliding_attention" if layer >= first else "full_attention" for layer in range(config.num_layers)]
    return {"sliding_windows": windows(values, layer_types(values, config, by_place=by_place))}


def _qwen2(values: Values, config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": True} | _windows(values, config)


def _qwen3(values: Values, config: ModelConfig) -> dict[str, Any]:
    return biases(values) | _windows(values, config)


FAMILIES = (
    Family(
        name="Qwen2",
        models="Qwen 2 and 2.5, Qwen2.5-Coder, DeepSeek R1 Distill Qwen",
        gguf=("qwen2",),
        defaults=DEFAULTS,
        read=_qwen2,
    ),
    Family(
        name="Qwen3",
        models="Qwen 3 dense, Qwen3-Embedding",
        gguf=("qwen3",),
        names=LLAMA_NAMES | QK_NORM,
        defaults=DEFAULTS | {"head_dim": 128},
        read=_qwen3,
    ),
)
