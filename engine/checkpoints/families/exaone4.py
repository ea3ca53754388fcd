"""EXAONE 4: norms behind attention and MLP; where layers have windows, those without know no positions."""

from typing import Any

from engine.checkpoints.family import (
    LLAMA_NAMES,
    OUTPUT_NORMS,
    QK_NORM,
    Family,
    layer_types,
    other_rope,
    windows,
    without,
)
from engine.checkpoints.values import Values
from engine.models.config import NOPE, ModelConfig


def _exaone4(values: Values, config: ModelConfig) -> dict[str, Any]:
    if "sliding_window" not in values:
        return {}
    kinds = layer_types(values, config, 4)
    nope = other_rope(config, NOPE, [kind == "full_attention" for kind in kinds])
    return {"sliding_windows": windows(values, kinds)} | nope


FAMILIES = (
    Family(
        name="Exaone4",
        models="EXAONE 4.0 1.2B and 32B",
        gguf=("exaone4",),
        names=without(LLAMA_NAMES, "input_norm", "post_attention_norm") | OUTPUT_NORMS | QK_NORM,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        read=_exaone4,
    ),
)
