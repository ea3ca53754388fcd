"""GLM-4, dense: neighbours turn together, half of each head; the second form norms outputs as well."""

from typing import Any

from engine.checkpoints.family import FUSED_GATE_UP, LLAMA_NAMES, Family, without
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

NAMES = without(LLAMA_NAMES, "gate", "up") | FUSED_GATE_UP
DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


def _glm(values: Values, config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": values.flag("attention_bias")}


FAMILIES = (
    Family(
        name="Glm", models="GLM-4 9B (glm-4-9b-chat-hf)", names=NAMES, defaults=DEFAULTS, read=_glm, is_interleaved=True
    ),
    Family(
        name="Glm4",
        models="GLM-4-0414, GLM-Z1",
        gguf=("glm4",),
        names=NAMES
        | {
            "attention_output_norm": ("model.layers.N.post_self_attn_layernorm", "blk.N.post_attention_norm"),
            "mlp_output_norm": ("model.layers.N.post_mlp_layernorm", "blk.N.post_ffw_norm"),
        },
        defaults=DEFAULTS,
        read=_glm,
        is_interleaved=True,
        gguf_is_interleaved=True,
    ),
)
