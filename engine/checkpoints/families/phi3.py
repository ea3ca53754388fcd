"""Phi-3, 3.5, 4 and 4-mini: Llama whose projections are stored fused; heads may turn in part."""

from engine.checkpoints.family import FUSED_GATE_UP, FUSED_QKV, LLAMA_NAMES, Family, windowed, without

FAMILIES = (
    Family(
        name="Phi3",
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        gguf=("phi3",),
        names=without(LLAMA_NAMES, "q", "k", "v", "gate", "up") | FUSED_QKV | FUSED_GATE_UP,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        read=windowed,
    ),
)
