"""StableLM: Llama with LayerNorm, of whose heads a part turns."""

from typing import Any

from engine.checkpoints.family import Family
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig


def _stablelm(values: Values, config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": values.flag("use_qkv_bias")}


FAMILIES = (
    Family(
        name="StableLm",
        models="StableLM 3B, StableLM 2 1.6B, Stable Code",
        gguf=("stablelm",),
        defaults={"max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        form={"layer_norm": True},
        fields={"norm_bias": True},
        read=_stablelm,
        eps="layer_norm_eps",
    ),
)
