"""SmolLM3: Llama with layers that know no positions."""

from typing import Any

from engine.checkpoints.family import Family, biases, layer_types, other_rope, windows
from engine.checkpoints.values import Values
from engine.models.config import NOPE, ModelConfig


def _smollm3(values: Values, config: ModelConfig) -> dict[str, Any]:
    num_layers = config.num_layers
    interval = values.whole("no_rope_layer_interval", 4)
    turns = values.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(num_layers)])
    if not isinstance(turns, list) or len(turns) != num_layers or any(flag not in (0, 1) for flag in turns):
        raise values.refusal("no_rope_layers", f"0 or 1 for each of {num_layers} layers is needed")
    own = (
        biases(values) | {"mlp_bias": values.flag("mlp_bias")} | other_rope(config, NOPE, [not flag for flag in turns])
    )
    if values.flag("use_sliding_window") and "sliding_window" in values:
        by_place = ["sliding_attention" if not flag else "full_attention" for flag in turns]
        own["sliding_windows"] = windows(values, layer_types(values, config, by_place=by_place))
    return own


FAMILIES = (
    Family(
        name="SmolLM3",
        models="SmolLM3 3B",
        gguf=("smollm3",),
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        read=_smollm3,
        gguf_is_interleaved=True,
    ),
)
