"""Architectures that are Llama but for a bias, an activation or the order of a head."""

from typing import Any

from engine.checkpoints.family import LLAMA_NAMES, Family, biases, without
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig


def _biases(values: Values, config: ModelConfig) -> dict[str, Any]:
    return biases(values) | {"mlp_bias": values.flag("mlp_bias")}


def _seed_oss(values: Values, config: ModelConfig) -> dict[str, Any]:
    own = {"attention_bias": "attention_bias", "output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}
    return {field: values.flag(key, key == "attention_bias") for field, key in own.items()}


FAMILIES = (
    Family(
        name="Arcee",
        models="Arcee AFM 4.5B",
        gguf=("arcee",),
        names=without(LLAMA_NAMES, "gate"),
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        read=_biases,
        gguf_is_interleaved=True,
    ),
    Family(
        name="Helium",
        models="Helium 1 2B",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "head_dim": 128,
            "num_key_value_heads": 20,
            "rope_theta": 100000.0,
        },
        read=_biases,
        is_interleaved=True,
    ),
    Family(
        name="SeedOss",
        models="Seed-OSS 36B",
        gguf=("seed_oss",),
        names=LLAMA_NAMES
        | {"post_attention_norm": ("model.layers.N.post_attention_layernorm", "blk.N.post_attention_norm")},
        defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
        read=_seed_oss,
    ),
)
