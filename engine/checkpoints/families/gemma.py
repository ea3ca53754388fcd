"""Gemma 1, 2 and 3 (text): norm weights are stored less 1, embeddings are scaled, later ones norm outputs as well."""

from math import sqrt
from typing import Any

from engine.checkpoints.family import (
    LLAMA_NAMES,
    OUTPUT_NORMS,
    QK_NORM,
    Family,
    biases,
    layer_types,
    local_rope,
    windows,
)
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

NAMES = (
    LLAMA_NAMES | OUTPUT_NORMS | {"post_attention_norm": ("model.layers.N.pre_feedforward_layernorm", "blk.N.ffn_norm")}
)
TANH = "gelu_pytorch_tanh"
SIZES = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096, "query_pre_attn_scalar": 256}
LARGEST = {46: "Gemma 2 27B", 62: "Gemma 3 27B"}
"""Numbers of layers of the models whose scores are scaled by the hidden size of a head; GGUF does not tell."""


def _gemma(values: Values, config: ModelConfig) -> dict[str, Any]:
    common = {"norm_offset": 1.0, "embedding_scale": sqrt(config.hidden_size)}
    return common if values.is_gguf else common | biases(values)


def _scores(values: Values, config: ModelConfig) -> dict[str, Any]:
    of_head = config.hidden_size / config.num_heads if config.num_layers in LARGEST else config.head_dim
    scalar = of_head if values.is_gguf else values.number("query_pre_attn_scalar", least=1e-3)
    return {
        "attention_scale": scalar**-0.5,
        "attention_softcap": values.number("attn_logit_softcapping", 0.0),
        "logit_softcap": values.number("final_logit_softcapping", 0.0),
    }


def _gemma2(values: Values, config: ModelConfig) -> dict[str, Any]:
    own_windows = {"sliding_windows": windows(values, layer_types(values, config, 2))}
    return _gemma(values, config) | _scores(values, config) | own_windows


def _gemma3(values: Values, config: ModelConfig) -> dict[str, Any]:
    kinds = layer_types(values, config, 6)
    own = {"sliding_windows": windows(values, kinds)} | local_rope(values, config, kinds, 10000.0)
    if config.rope.rope_type == "linear":  # the context is given with the extension
        factor = config.rope.parameters["factor"]
        own["max_position_embeddings"] = max(1, int(config.max_position_embeddings / factor))
    return _gemma(values, config) | _scores(values, config) | own


FAMILIES = (
    Family(
        name="Gemma",
        models="Gemma 1, CodeGemma",
        gguf=("gemma",),
        defaults={"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True, "hidden_act": TANH},
        read=_gemma,
    ),
    Family(
        name="Gemma2",
        models="Gemma 2",
        gguf=("gemma2",),
        names=NAMES,
        defaults=SIZES
        | {
            "max_position_embeddings": 8192,
            "hidden_activation": TANH,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        gguf_defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        read=_gemma2,
    ),
    Family(
        name="Gemma3",
        models="Gemma 3 (text): 270M, 1B, and the text part of the others",
        gguf=("gemma3",),
        names=NAMES | QK_NORM,
        defaults=SIZES | {"max_position_embeddings": 131072, "hidden_activation": TANH, "rope_theta": 1e6},
        gguf_defaults={"rope.freq_base": 1e6},
        read=_gemma3,
        also=("Gemma3Text",),
    ),
)
