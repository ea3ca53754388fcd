"""Falcon as its 7B has it: one LayerNorm for attention and MLP, one head of keys and values."""

from typing import Any

from engine.checkpoints.family import Family
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

LAYER = "transformer.h.N."
NAMES = {
    "embed": ("transformer.word_embeddings", "token_embd"),
    "final_norm": ("transformer.ln_f", "output_norm"),
    "head": ("lm_head", "output"),
    "input_norm": (f"{LAYER}input_layernorm", "blk.N.attn_norm"),
    "qkv": (f"{LAYER}self_attention.query_key_value", "blk.N.attn_qkv"),
    "output": (f"{LAYER}self_attention.dense", "blk.N.attn_output"),
    "post_attention_norm": (f"{LAYER}input_layernorm", "blk.N.attn_norm"),
    "up": (f"{LAYER}mlp.dense_h_to_4h", "blk.N.ffn_up"),
    "down": (f"{LAYER}mlp.dense_4h_to_h", "blk.N.ffn_down"),
}


def _falcon(values: Values, config: ModelConfig) -> dict[str, Any]:
    for key, needed in (("new_decoder_architecture", False), ("multi_query", True), ("parallel_attn", True)):
        if not values.is_gguf and values.flag(key, needed) != needed:
            raise values.refusal(key, f"only {str(needed).lower()} is supported")
    own = {} if values.is_gguf else {"num_kv_heads": 1}
    return dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), values.flag("bias")) | own


FAMILIES = (
    Family(
        name="Falcon",
        models="Falcon 7B",
        gguf=("falcon",),
        names=NAMES,
        keys={"intermediate_size": "ffn_hidden_size", "hidden_act": "activation"},
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "tie_word_embeddings": True,
        },
        form={"layer_norm": True, "is_parallel": True},
        fields={"norm_bias": True},
        read=_falcon,
        eps="layer_norm_epsilon",
        mlp_ratio=4,
    ),
)
