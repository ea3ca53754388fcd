"""GPT-J: one LayerNorm for attention and MLP, neighbours turn together, a head with a bias."""

from typing import Any

from engine.checkpoints.family import GPT_KEYS, Family
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

LAYER = "transformer.h.N."
NAMES = {
    "embed": ("transformer.wte", "token_embd"),
    "final_norm": ("transformer.ln_f", "output_norm"),
    "head": ("lm_head", "output"),
    "input_norm": (f"{LAYER}ln_1", "blk.N.attn_norm"),
    "q": (f"{LAYER}attn.q_proj", "blk.N.attn_q"),
    "k": (f"{LAYER}attn.k_proj", "blk.N.attn_k"),
    "v": (f"{LAYER}attn.v_proj", "blk.N.attn_v"),
    "output": (f"{LAYER}attn.out_proj", "blk.N.attn_output"),
    "post_attention_norm": (f"{LAYER}ln_1", "blk.N.attn_norm"),
    "up": (f"{LAYER}mlp.fc_in", "blk.N.ffn_up"),
    "down": (f"{LAYER}mlp.fc_out", "blk.N.ffn_down"),
}


def _gptj(values: Values, config: ModelConfig) -> dict[str, Any]:
    rotary_dim = values.whole("rotary_dim", 64, least=2, most=config.head_dim)
    if rotary_dim % 2:
        raise values.refusal("rotary_dim", "an even number is needed")
    return {"rotary_dim": rotary_dim}


FAMILIES = (
    Family(
        name="GPTJ",
        models="GPT-J 6B",
        names=NAMES,
        keys=GPT_KEYS,
        defaults={"n_positions": 2048, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
        form={"layer_norm": True, "is_parallel": True},
        fields={"norm_bias": True, "mlp_bias": True, "head_bias": True},
        read=_gptj,
        eps="layer_norm_epsilon",
        mlp_ratio=4,
        is_interleaved=True,
    ),
)
