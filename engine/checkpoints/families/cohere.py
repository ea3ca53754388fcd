"""Cohere and Cohere 2: one LayerNorm for attention and MLP, which both add to the residual stream; scaled logits."""

from typing import Any

from engine.checkpoints.family import LLAMA_NAMES, Family, biases, layer_types, other_rope, windows
from engine.checkpoints.values import Values
from engine.models.config import NOPE, ModelConfig

NAMES = LLAMA_NAMES | {"post_attention_norm": LLAMA_NAMES["input_norm"]}
FORM = {"layer_norm": True, "is_parallel": True}
DEFAULTS = {"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}


def _cohere(values: Values, config: ModelConfig) -> dict[str, Any]:
    return biases(values) | {"logit_scale": values.number("logit_scale", 1.0)}


def _cohere2(values: Values, config: ModelConfig) -> dict[str, Any]:
    """Every fourth layer sees everything and knows no positions."""
    kinds = layer_types(values, config, 4)
    nope = other_rope(config, NOPE, [kind == "full_attention" for kind in kinds])
    return _cohere(values, config) | {"sliding_windows": windows(values, kinds)} | nope


FAMILIES = (
    Family(
        name="Cohere",
        models="Command R, Aya 23 and Expanse 8B",
        gguf=("command-r",),
        names=NAMES,
        defaults=DEFAULTS | {"rope_theta": 500000.0},
        form=FORM,
        read=_cohere,
        eps="layer_norm_eps",
        is_interleaved=True,
        gguf_is_interleaved=True,
    ),
    Family(
        name="Cohere2",
        models="Command R7B, Command A",
        gguf=("cohere2",),
        names=NAMES,
        defaults=DEFAULTS | {"sliding_window": 4096},
        form=FORM,
        read=_cohere2,
        eps="layer_norm_eps",
        is_interleaved=True,
        gguf_is_interleaved=True,
    ),
)
