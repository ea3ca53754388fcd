"""Phi-1, 1.5 and 2: one LayerNorm for attention and MLP, which both add to the residual stream; biases everywhere."""

from typing import Any

import msgspec

from engine.checkpoints.family import LLAMA_NAMES, Family, without
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

NAMES = without(LLAMA_NAMES, "gate") | {
    "final_norm": ("model.final_layernorm", "output_norm"),
    "output": ("model.layers.N.self_attn.dense", "blk.N.attn_output"),
    "post_attention_norm": LLAMA_NAMES["input_norm"],
    "up": ("model.layers.N.mlp.fc1", "blk.N.ffn_up"),
    "down": ("model.layers.N.mlp.fc2", "blk.N.ffn_down"),
}


def _phi(values: Values, config: ModelConfig) -> dict[str, Any]:
    form = msgspec.structs.replace(config.form, layer_norm=True, is_parallel=True)
    has_biases = ("norm_bias", "attention_bias", "output_bias", "mlp_bias", "head_bias")
    return dict.fromkeys(has_biases, True) | {"form": form}


FAMILIES = (
    Family(
        name="Phi",
        models="Phi-1, Phi-1.5, Phi-2",
        gguf=("phi2",),
        names=NAMES,
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
        },
        read=_phi,
        eps="layer_norm_eps",
    ),
)
