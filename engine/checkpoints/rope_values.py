"""Rotary parameters of config.json, in both forms: `rope_theta` + `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5).
"""

from typing import Any, cast

from configs.errors import CheckpointError
from engine.models.config import RopeConfig

from .values import MAX_CONTEXT, Values, named

MIN_FACTOR, MAX_FACTOR = 1e-3, 1e6
"""Bounds of the factors that scale rotary frequencies."""

# Scaling parameters that a rotary type cannot do without.
REQUIRED_ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


def scaling_values(values: Values, kind: str = "full_attention") -> Values:
    """The entry that scales rotary embedding; some families have one for each kind of layer."""
    scaling = values.section("rope_scaling" if values.get("rope_scaling") else "rope_parameters")
    if "full_attention" in scaling or "sliding_attention" in scaling:
        return scaling.section(kind)
    return scaling if kind == "full_attention" else Values(values.file, {})


def rotary_dim(values: Values, head_dim: int, *, may_be_partial: bool) -> int:
    """Elements of a head that turn."""
    key, scaling = "partial_rotary_factor", scaling_values(values)
    holder = scaling if key in scaling else values
    if key in values and may_be_partial:  # both are there; the one among the parameters holds
        values.number(key, least=MIN_FACTOR, most=1)
    factor = holder.number(key, 1.0, least=MIN_FACTOR, most=1)
    if factor != 1 and not may_be_partial:
        raise holder.refusal(key, "only 1 is supported by this architecture")
    dim = int(head_dim * factor)
    if dim % 2 or dim < 2:
        raise holder.refusal(key, f"an even part of head_dim {head_dim} is needed")
    return dim


def parse_rope(
    values: Values,
    head_dim: int,
    *,
    kind: str = "full_attention",
    theta_key: str = "rope_theta",
    theta: float = 10000.0,
) -> RopeConfig:
    """`head_dim` counts the elements that turn. Raises CheckpointError for what is not supported or out of bounds."""
    file, scaling, default_theta = values.file, scaling_values(values, kind), theta
    rope_type = scaling.get("rope_type") or scaling.get("type", "default")
    if not isinstance(rope_type, str) or rope_type not in REQUIRED_ROPE_PARAMETERS:
        known = ", ".join(REQUIRED_ROPE_PARAMETERS)
        raise CheckpointError(f"{file}: rope_type {named(rope_type)} is not supported; these are: {known}")
    for key in REQUIRED_ROPE_PARAMETERS[rope_type]:
        if key not in scaling:
            raise CheckpointError(f"{file}: rope_type {rope_type} needs {key}")
    holder, key = (scaling, "rope_theta") if "rope_theta" in scaling else (values, theta_key)
    theta = holder.number(key, default_theta, least=2, most=1e30)
    parameters = _rope_parameters(rope_type, scaling, head_dim)
    if rope_type in ("llama3", "yarn", "longrope"):
        # A top-level value has precedence over the one among the parameters (Phi-3 writes it there).
        key = "original_max_position_embeddings"
        context = values.whole("max_position_embeddings", most=MAX_CONTEXT)
        parameters[key] = (values if key in values else scaling).whole(key, context, least=2, most=MAX_CONTEXT)
    return check_rope(
        RopeConfig(rope_type=cast(Any, rope_type), theta=theta, parameters=parameters), values, "rope factor"
    )


def check_rope(rope: RopeConfig, values: Values, name: str) -> RopeConfig:
    """Refuse a `factor`, called `name`, that extends the context beyond all measure."""
    context = values.whole("max_position_embeddings", most=MAX_CONTEXT)
    length = rope.parameters.get("original_max_position_embeddings", context)
    if rope.rope_type in ("linear", "dynamic", "yarn") and rope.parameters.get("factor", 1.0) * length > MAX_CONTEXT:
        raise CheckpointError(
            f"{values.file}: {name} {rope.parameters['factor']:g} makes a context of more than {MAX_CONTEXT} tokens"
        )
    return rope


def _rope_parameters(rope_type: str, scaling: Values, head_dim: int) -> dict[str, Any]:
    """All but the original context."""
    parameters: dict[str, Any] = {}
    for key in ("factor", "attention_factor", "low_freq_factor", "high_freq_factor"):
        if key in scaling:
            parameters[key] = scaling.number(key, least=MIN_FACTOR, most=MAX_FACTOR)
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if key in scaling:
            parameters[key] = scaling.number(key)
    if "truncate" in scaling:
        parameters["truncate"] = scaling.flag("truncate")
    if rope_type == "llama3" and parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise scaling.refusal("high_freq_factor", "more than low_freq_factor is needed")
    if rope_type == "longrope":
        for key in ("short_factor", "long_factor"):
            parameters[key] = scaling.numbers(key, head_dim // 2, least=MIN_FACTOR, most=MAX_FACTOR)
    return parameters
