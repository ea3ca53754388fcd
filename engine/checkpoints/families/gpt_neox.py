"""GPT-NeoX, which is Pythia: LayerNorms of its own for attention and MLP, which read the same residual stream."""

from typing import Any

import msgspec

from engine.checkpoints.family import ONE_KV_HEAD_EACH, Family
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

LAYER = "gpt_neox.layers.N."
NAMES = {
    "embed": ("gpt_neox.embed_in", "token_embd"),
    "final_norm": ("gpt_neox.final_layer_norm", "output_norm"),
    "head": ("embed_out", "output"),
    "input_norm": (f"{LAYER}input_layernorm", "blk.N.attn_norm"),
    "qkv": (f"{LAYER}attention.query_key_value", "blk.N.attn_qkv"),
    "output": (f"{LAYER}attention.dense", "blk.N.attn_output"),
    "post_attention_norm": (f"{LAYER}post_attention_layernorm", "blk.N.ffn_norm"),
    "up": (f"{LAYER}mlp.dense_h_to_4h", "blk.N.ffn_up"),
    "down": (f"{LAYER}mlp.dense_4h_to_h", "blk.N.ffn_down"),
}


def _gpt_neox(values: Values, config: ModelConfig) -> dict[str, Any]:
    is_parallel = values.flag("use_parallel_residual", True)
    has_bias = values.flag("attention_bias", True)
    return {
        "form": msgspec.structs.replace(config.form, is_parallel=is_parallel),
        "attention_bias": has_bias,
        "output_bias": has_bias,
    }


FAMILIES = (
    Family(
        name="GPTNeoX",
        models="Pythia, GPT-NeoX 20B, Dolly 2",
        gguf=("gptneox",),
        names=NAMES,
        keys=ONE_KV_HEAD_EACH | {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        defaults={"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.25},
        form={"layer_norm": True},
        fields={"norm_bias": True, "mlp_bias": True},
        read=_gpt_neox,
        eps="layer_norm_eps",
        qkv_by_head=True,
    ),
)
