"""OLMo 2 and 3: norms behind attention and MLP instead of before, and of all heads together."""

from typing import Any

from engine.checkpoints.family import (
    LLAMA_NAMES,
    OUTPUT_NORMS,
    QK_NORM,
    Family,
    biases,
    layer_types,
    local_rope,
    windows,
    without,
)
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

NAMES = without(LLAMA_NAMES, "input_norm", "post_attention_norm") | OUTPUT_NORMS | QK_NORM
DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def _olmo2(values: Values, config: ModelConfig) -> dict[str, Any]:
    """GGUF calls both olmo2; the third has windows, and scales the positions of the other layers alone."""
    own = biases(values) | {"full_qk_norm": True}
    if not values.is_gguf or "sliding_window" not in values:
        return own
    return own | _olmo3(values, config)


def _olmo3(values: Values, config: ModelConfig) -> dict[str, Any]:
    kinds = layer_types(values, config, 4)
    local = local_rope(values, config, kinds, config.rope.theta)
    return biases(values) | {"full_qk_norm": True, "sliding_windows": windows(values, kinds)} | local


FAMILIES = (
    Family(name="Olmo2", models="OLMo 2", gguf=("olmo2",), names=NAMES, defaults=DEFAULTS, read=_olmo2),
    Family(
        name="Olmo3",
        models="OLMo 3",
        names=NAMES,
        defaults=DEFAULTS | {"sliding_window": 4096, "rope_theta": 500000.0},
        read=_olmo3,
    ),
)
