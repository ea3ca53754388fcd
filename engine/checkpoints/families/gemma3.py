"""Gemma 3, text: five of six layers have a window and rotary parameters of their own; norms of q and k, no caps."""

from typing import Any

from engine.checkpoints.families.gemma import NAMES, SIZES, TANH, gemma2
from engine.checkpoints.family import QK_NORM, Family, layer_types, local_rope
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig


def _gemma3(values: Values, config: ModelConfig) -> dict[str, Any]:
    own = gemma2(values, config, 6) | local_rope(values, config, layer_types(values, config, 6), 10000.0)
    if config.rope.rope_type == "linear":  # the context is given with the extension
        own["max_position_embeddings"] = max(1, int(config.max_position_embeddings / config.rope.parameters["factor"]))
    return own


FAMILIES = (
    Family(
        name="Gemma3",
        models="Gemma 3 270M and 1B; the text part of 4B, 12B and 27B",
        gguf=("gemma3",),
        names=NAMES | QK_NORM,
        defaults=SIZES
        | {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "hidden_activation": TANH,
            "rope_theta": 1e6,
        },
        gguf_defaults={"rope.freq_base": 1e6},
        read=_gemma3,
        also=("Gemma3Text",),
    ),
)
