"""Gemma 1 and 2: norm weights are stored less 1, embeddings are scaled; the second norms outputs and caps scores."""

from math import sqrt
from typing import Any

from engine.checkpoints.family import LLAMA_NAMES, OUTPUT_NORMS, Family, biases, layer_types, windows
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

BEFORE_MLP = ("model.layers.N.pre_feedforward_layernorm", "blk.N.ffn_norm")
NAMES = LLAMA_NAMES | OUTPUT_NORMS | {"post_attention_norm": BEFORE_MLP}
TANH = "gelu_pytorch_tanh"
SIZES = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096, "query_pre_attn_scalar": 256}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LARGEST = {46: "Gemma 2 27B", 62: "Gemma 3 27B"}
"""Numbers of layers of the models whose scores are scaled by the hidden size of a head; GGUF does not tell."""


def gemma(values: Values, config: ModelConfig) -> dict[str, Any]:
    common = {"norm_offset": 1.0, "embedding_scale": sqrt(config.hidden_size)}
    return common if values.is_gguf else common | biases(values)


def gemma2(values: Values, config: ModelConfig, pattern: int = 2) -> dict[str, Any]:
    of_head = config.hidden_size / config.num_heads if config.num_layers in LARGEST else config.head_dim
    scalar = of_head if values.is_gguf else values.number("query_pre_attn_scalar", least=1e-3)
    return gemma(values, config) | {
        "attention_scale": scalar**-0.5,
        "attention_softcap": values.number("attn_logit_softcapping", 0.0),
        "logit_softcap": values.number("final_logit_softcapping", 0.0),
        "sliding_windows": windows(values, layer_types(values, config, pattern)),
    }


FAMILIES = (
    Family(
        name="Gemma",
        models="Gemma 1, CodeGemma",
        gguf=("gemma",),
        defaults={"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True, "hidden_act": TANH},
        read=gemma,
    ),
    Family(
        name="Gemma2",
        models="Gemma 2",
        gguf=("gemma2",),
        names=NAMES,
        defaults=SIZES | CAPS | {"max_position_embeddings": 8192, "hidden_activation": TANH},
        gguf_defaults=CAPS,
        read=gemma2,
    ),
)
