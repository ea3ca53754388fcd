"""Rotary parameters of GGUF's metadata, and of the tensors that hold divisors of the frequencies."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import CheckpointError
from engine.models.config import RopeConfig

from .checkpoint import StoredTensor
from .rope_values import MAX_FACTOR, MIN_FACTOR, check_rope
from .values import MAX_CONTEXT, Values, named

# Divisors of rotary frequencies: part of the configuration, not of the network's weights.
ROPE_TENSORS = ROPE_FREQS, ROPE_SHORT, ROPE_LONG = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)


def gguf_rope(values: Values, tensors: dict[str, StoredTensor], head_dim: int) -> RopeConfig:
    """`head_dim` counts the elements that turn."""
    theta = values.number("rope_theta", 10000.0, least=2, most=1e30)
    context_length = values.whole("max_position_embeddings", most=MAX_CONTEXT)
    original = values.whole("rope.scaling.original_context_length", context_length, least=2, most=MAX_CONTEXT)
    scale = {"least": MIN_FACTOR, "most": MAX_FACTOR}
    attention_factor = values.number("rope.scaling.attn_factor", 1.0, **scale)
    if ROPE_LONG in tensors:
        names = {"short_factor": ROPE_SHORT, "long_factor": ROPE_LONG}
        factors = {key: _divisors(values.file, tensors, name, head_dim) for key, name in names.items()}
        own = attention_factor if "rope.scaling.attn_factor" in values else None
        return _longrope(theta, factors, original, context_length / original, own)
    if ROPE_FREQS in tensors:
        # Llama 3's scaling, stored as its result: divisors that hold at every length.
        divisors = _divisors(values.file, tensors, ROPE_FREQS, head_dim)
        return _longrope(theta, {"short_factor": divisors, "long_factor": divisors}, original, 1.0, 1.0)
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0, **scale), **scale)
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta)
    if kind == "linear":
        rope = RopeConfig(rope_type="linear", theta=theta, parameters={"factor": factor})
    elif kind == "yarn":
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        parameters: dict[str, Any] = {name: values.number(key) for name, key in betas.items() if key in values}
        parameters |= {"factor": factor, "original_max_position_embeddings": original}
        rope = RopeConfig(rope_type="yarn", theta=theta, parameters=parameters)
        own = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        multiplier = values.number("rope.scaling.yarn_log_multiplier", 0.0)  # Hugging Face's mscale_all_dim
        if attention_factor != 1.0 or multiplier:  # beside the one of YaRN
            parameters["attention_factor"] = own / (0.1 * multiplier * math.log(max(factor, 1.0)) + 1.0)
    else:
        raise CheckpointError(f"{values.file}: rope.scaling.type {named(kind)} is not supported")
    return check_rope(rope, values, "rope.scaling.factor")


def _longrope(
    theta: float, factors: dict[str, list[float]], original: int, factor: float, attention_factor: float | None
) -> RopeConfig:
    parameters: dict[str, Any] = factors | {"factor": factor, "original_max_position_embeddings": original}
    if attention_factor is not None:
        parameters["attention_factor"] = attention_factor
    return RopeConfig(rope_type="longrope", theta=theta, parameters=parameters)


def _divisors(file: Path, tensors: dict[str, StoredTensor], name: str, head_dim: int) -> list[float]:
    tensor = tensors.get(name)
    if tensor is None or tensor.read is None or (tensor.dtype, tensor.shape) != ("F32", (head_dim // 2,)):
        raise CheckpointError(f"{file}: tensor {name} with {head_dim // 2} numbers of type F32 is missing")
    floats = tensor.read().view(np.float32)
    if not (np.isfinite(floats) & (floats > 0)).all():
        raise CheckpointError(f"{tensor.file}: tensor {name} holds what is no factor")
    return [float(value) for value in floats]
