"""OPT: learned positions that begin at row 2, LayerNorms, an MLP without gates."""

from typing import Any

from engine.checkpoints.family import ONE_KV_HEAD_EACH, Family
from engine.checkpoints.values import Values
from engine.models.config import NOPE, ModelConfig

LAYER = "model.decoder.layers.N."
NAMES = {
    "embed": ("model.decoder.embed_tokens", "token_embd"),
    "positions": ("model.decoder.embed_positions", "position_embd"),
    "final_norm": ("model.decoder.final_layer_norm", "output_norm"),
    "head": ("lm_head", "output"),
    "input_norm": (f"{LAYER}self_attn_layer_norm", "blk.N.attn_norm"),
    "q": (f"{LAYER}self_attn.q_proj", "blk.N.attn_q"),
    "k": (f"{LAYER}self_attn.k_proj", "blk.N.attn_k"),
    "v": (f"{LAYER}self_attn.v_proj", "blk.N.attn_v"),
    "output": (f"{LAYER}self_attn.out_proj", "blk.N.attn_output"),
    "post_attention_norm": (f"{LAYER}final_layer_norm", "blk.N.ffn_norm"),
    "up": (f"{LAYER}fc1", "blk.N.ffn_up"),
    "down": (f"{LAYER}fc2", "blk.N.ffn_down"),
}
FIRST_ROW = 2


def _opt(values: Values, config: ModelConfig) -> dict[str, Any]:
    if not values.flag("do_layer_norm_before", True) or values.flag("_remove_final_layer_norm"):
        raise values.refusal("do_layer_norm_before", "only norms before attention and MLP are supported")
    if values.whole("word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise values.refusal("word_embed_proj_dim", f"the hidden size {config.hidden_size} is needed")
    has_bias = values.flag("enable_bias", True)
    return dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), has_bias) | {
        "norm_bias": values.flag("layer_norm_elementwise_affine", True),
        "learned_positions": config.max_position_embeddings + FIRST_ROW,
    }


FAMILIES = (
    Family(
        name="OPT",
        models="OPT 125M to 66B, but for 350M",
        names=NAMES,
        keys=ONE_KV_HEAD_EACH | {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "activation_function": "relu",
            "tie_word_embeddings": True,
        },
        form={"layer_norm": True},
        fields={"rope": NOPE, "position_offset": FIRST_ROW},
        read=_opt,
        eps="layer_norm_eps",
    ),
)
