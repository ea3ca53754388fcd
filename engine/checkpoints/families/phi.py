"""Phi-1, 1.5 and 2: one LayerNorm for attention and MLP, which both add to the residual stream; biases everywhere.
Phi-3, 3.5, 4 and 4-mini: Llama whose projections are stored fused. Heads may turn in part."""

from engine.checkpoints.family import FUSED_GATE_UP, FUSED_QKV, LLAMA_NAMES, Family, windowed, without

NAMES = without(LLAMA_NAMES, "gate") | {
    "final_norm": ("model.final_layernorm", "output_norm"),
    "output": ("model.layers.N.self_attn.dense", "blk.N.attn_output"),
    "post_attention_norm": LLAMA_NAMES["input_norm"],
    "up": ("model.layers.N.mlp.fc1", "blk.N.ffn_up"),
    "down": ("model.layers.N.mlp.fc2", "blk.N.ffn_down"),
}


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
        form={"layer_norm": True, "is_parallel": True},
        fields=dict.fromkeys(("norm_bias", "attention_bias", "output_bias", "mlp_bias", "head_bias"), True),
        eps="layer_norm_eps",
    ),
    Family(
        name="Phi3",
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        gguf=("phi3",),
        names=without(LLAMA_NAMES, "q", "k", "v", "gate", "up") | FUSED_QKV | FUSED_GATE_UP,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        read=windowed,
    ),
)
