"""StarCoder2: LayerNorm, an MLP without gates, biases everywhere."""

from typing import Any

from engine.checkpoints.family import LLAMA_NAMES, Family, windowed, without
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig

MLP = {
    "up": ("model.layers.N.mlp.c_fc", "blk.N.ffn_up"),
    "down": ("model.layers.N.mlp.c_proj", "blk.N.ffn_down"),
}


def _starcoder2(values: Values, config: ModelConfig) -> dict[str, Any]:
    own_biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), values.flag("use_bias", True))
    return own_biases | windowed(values, config)


FAMILIES = (
    Family(
        name="Starcoder2",
        models="StarCoder2 3B, 7B, 15B",
        gguf=("starcoder2",),
        names=without(LLAMA_NAMES, "gate") | MLP,
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        form={"layer_norm": True},
        fields={"norm_bias": True},
        read=_starcoder2,
        eps="norm_epsilon",
    ),
)
