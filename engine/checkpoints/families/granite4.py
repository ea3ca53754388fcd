"""Granite 4 without recurrent layers and experts: Granite by another name."""

from typing import Any

from engine.checkpoints.families.granite import granite
from engine.checkpoints.family import LLAMA_NAMES, Family, without
from engine.checkpoints.values import Values
from engine.models.config import NOPE, ModelConfig

NAMES = without(LLAMA_NAMES, "gate", "up") | {
    "gate_up": ("model.layers.N.shared_mlp.input_linear", "blk.N.ffn_gate_up"),
    "down": ("model.layers.N.shared_mlp.output_linear", "blk.N.ffn_down"),
}
ATTENTION = ("attention", "full_attention")


def _granite4(values: Values, config: ModelConfig) -> dict[str, Any]:
    key = "layers_block_type" if "layers_block_type" in values else "layer_types"
    kinds = values.get(key)
    if not isinstance(kinds, list) or len(kinds) != config.num_layers or any(kind not in ATTENTION for kind in kinds):
        raise values.refusal(key, "attention in every layer is needed; recurrent layers are not supported")
    if values.whole("num_local_experts", 8, least=0):
        raise values.refusal("num_local_experts", "0 is needed; mixtures of experts are not supported")
    has_positions = values.get("position_embedding_type") == "rope"
    return granite(values, config) | ({} if has_positions else {"rope": NOPE})


FAMILIES = (
    Family(
        name="GraniteMoeHybrid",
        models="Granite 4.0 micro and others that are neither hybrid nor mixtures",
        names=NAMES,
        keys={"intermediate_size": "shared_intermediate_size"},
        defaults={"max_position_embeddings": 2048, "shared_intermediate_size": 1024},
        read=_granite4,
    ),
)
