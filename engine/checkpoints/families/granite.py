"""Granite 3 and 4, dense: Llama with four multipliers, of which none costs anything."""

from typing import Any

from engine.checkpoints.family import Family, biases
from engine.checkpoints.values import Values
from engine.models.config import ModelConfig


def granite(values: Values, config: ModelConfig) -> dict[str, Any]:
    """Each layer adds m times its result to the residual stream. All read it through norms, so that the stream may be
    kept divided by m, and layers add what they have: norm(m * x) is norm(x) with the variance's eps divided by m * m.
    """
    residual = values.number("residual_multiplier", 1.0, least=1e-3)
    return biases(values) | {
        "mlp_bias": values.flag("mlp_bias"),
        "embedding_scale": values.number("embedding_multiplier", 1.0) / residual,
        "rms_norm_eps": config.rms_norm_eps / residual**2,
        "attention_scale": values.number("attention_multiplier", config.head_dim**-0.5 if values.is_gguf else 1.0),
        "logit_scale": 1 / values.number("logits_scaling", 1.0, least=1e-6),
    }


FAMILIES = (
    Family(
        name="Granite",
        models="Granite 3.0 to 3.3",
        gguf=("granite",),
        defaults={"max_position_embeddings": 2048},
        read=granite,
        gguf_is_interleaved=True,
    ),
)
