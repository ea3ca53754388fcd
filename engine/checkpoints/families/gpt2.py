"""GPT-2: learned positions, fused projections, and weights stored as [columns, rows]."""

from typing import Any

from engine.checkpoints.family import GPT_KEYS, Family
from engine.checkpoints.values import Values
from engine.models.config import NOPE, ModelConfig

LAYER = "transformer.h.N."
NAMES = {
    "embed": ("transformer.wte", "token_embd"),
    "positions": ("transformer.wpe", "position_embd"),
    "final_norm": ("transformer.ln_f", "output_norm"),
    "head": ("lm_head", "output"),
    "input_norm": (f"{LAYER}ln_1", "blk.N.attn_norm"),
    "qkv": (f"{LAYER}attn.c_attn", "blk.N.attn_qkv"),
    "output": (f"{LAYER}attn.c_proj", "blk.N.attn_output"),
    "post_attention_norm": (f"{LAYER}ln_2", "blk.N.ffn_norm"),
    "up": (f"{LAYER}mlp.c_fc", "blk.N.ffn_up"),
    "down": (f"{LAYER}mlp.c_proj", "blk.N.ffn_down"),
}
DEFAULTS = {
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}


def _gpt2(values: Values, config: ModelConfig) -> dict[str, Any]:
    is_scaled = values.flag("scale_attn_weights", True)
    return {"learned_positions": config.max_position_embeddings, "attention_scale": None if is_scaled else 1.0}


FAMILIES = (
    Family(
        name="GPT2",
        models="GPT-2, DistilGPT-2",
        gguf=("gpt2",),
        names=NAMES,
        keys=GPT_KEYS,
        defaults=DEFAULTS,
        form={"layer_norm": True},
        fields=dict.fromkeys(("norm_bias", "attention_bias", "output_bias", "mlp_bias"), True) | {"rope": NOPE},
        read=_gpt2,
        eps="layer_norm_epsilon",
        mlp_ratio=4,
        transposed=("qkv", "output", "up", "down"),
    ),
)
