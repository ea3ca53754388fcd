"""config.json of Hugging Face -> ModelConfig. A null means the default, as it does there.

Rotary parameters are accepted in both forms: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5).
"""

from pathlib import Path
from typing import Any, cast

from configs.errors import CheckpointError
from engine.models.config import ModelConfig, RopeConfig

from .values import MAX_CONTEXT, MAX_LAYERS, Values, named

# What each family assumes when config.json leaves a key out.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "Llama": {"max_position_embeddings": 2048},
    "Mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    "Qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}
FAMILY_DEFAULTS["Ministral"] = FAMILY_DEFAULTS["Mistral"]

WITH_HEAD = "ForCausalLM"
BASES = ("Model", "ForSequenceClassification", "ForTokenClassification")
"""Kinds of networks without a head for the next token: what comes before it is served, for embeddings."""

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


def parse_config(raw: dict[str, Any], file: Path, stored_dtype: str, *, has_head: bool) -> ModelConfig:
    """`raw` is config.json, `stored_dtype` the type of the stored weights, used when config.json names none.

    `has_head` tells whether the file's names leave room for one. Raises CheckpointError that names `file` and the key.
    """
    family, kind = _architecture(raw, file)
    # A null in the file removes the family's default: what is common to all families holds then.
    values = Values(file, FAMILY_DEFAULTS[family] | raw)
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{file}: hidden_act {named(values.get('hidden_act'))} is not supported, only silu is")
    num_heads = values.whole("num_attention_heads")
    num_kv_heads = values.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{file}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    hidden_size = values.whole("hidden_size")
    head_dim = values.whole("head_dim", hidden_size // num_heads, most=2**16)
    if head_dim % 2 or head_dim < 4:
        raise CheckpointError(f"{file}: head_dim {head_dim} is not supported; even numbers from 4 are")
    is_tied = values.flag("tie_word_embeddings")
    has_head = is_tied or (has_head and kind == WITH_HEAD)
    return ModelConfig(
        architecture=f"{family}{WITH_HEAD}",
        vocab_size=values.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.whole("intermediate_size"),
        num_layers=values.whole("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=values.whole("max_position_embeddings", most=MAX_CONTEXT),
        rms_norm_eps=values.number("rms_norm_eps", 1e-6, most=1),
        rope=parse_rope(values, head_dim),
        tie_word_embeddings=is_tied or not has_head,
        has_head=has_head,
        qk_norm=family == "Qwen3",
        sliding_windows=_sliding_windows(family, values),
        num_mtp_layers=values.whole("num_nextn_predict_layers", 0, least=0, most=MAX_LAYERS),
        dtype=_dtype(values, stored_dtype),
        **_biases(family, values),
    )


def _architecture(raw: dict[str, Any], file: Path) -> tuple[str, str]:
    """Family and kind, as Llama and ForCausalLM."""
    names = raw.get("architectures") or [f"{str(raw.get('model_type', '')).capitalize()}{WITH_HEAD}"]
    names = names if isinstance(names, list) else [names]
    for name in names:
        for family in FAMILY_DEFAULTS:
            kind = str(name).removeprefix(family)
            if name == f"{family}{kind}" and kind in (WITH_HEAD, *BASES):
                return family, kind
    own_code = ", and code of its own (auto_map) is never run" if "auto_map" in raw else ""
    known = ", ".join(f"{family}{WITH_HEAD}" for family in FAMILY_DEFAULTS)
    given = ", ".join(map(named, names[:3]))
    raise CheckpointError(f"{file}: architecture {given} is not supported{own_code}; these are: {known}")


def _dtype(values: Values, stored_dtype: str) -> str:
    """`torch_dtype` is the name of transformers 4."""
    dtype = named(values.get("dtype", values.get("torch_dtype", stored_dtype))).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(f"{values.file}: dtype {dtype} is not supported; float32, float16 and bfloat16 are")
    return dtype


def _biases(family: str, values: Values) -> dict[str, bool]:
    match family:
        case "Qwen2":
            return {"attention_bias": True}
        case "Mistral" | "Ministral":
            return {}
        case _:
            attention = values.flag("attention_bias")
            mlp = family == "Llama" and values.flag("mlp_bias")
            return {"attention_bias": attention, "output_bias": attention, "mlp_bias": mlp}


def _sliding_windows(family: str, values: Values) -> tuple[int | None, ...]:
    """One entry per layer, or () when every layer sees everything."""
    num_layers = values.whole("num_hidden_layers", most=MAX_LAYERS)
    if family == "Llama" or "sliding_window" not in values:
        return ()
    is_qwen = family in ("Qwen2", "Qwen3")
    if is_qwen and not values.flag("use_sliding_window"):
        return ()
    window = values.whole("sliding_window")
    first = values.whole("max_window_layers", least=0) if is_qwen else 0
    by_place = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    kinds = values.get("layer_types", by_place)
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise values.refusal("layer_types", f"sliding_attention or full_attention for each of {num_layers} layers")
    windows: tuple[int | None, ...] = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def parse_rope(values: Values, head_dim: int) -> RopeConfig:
    """Raises CheckpointError for what is not supported or out of bounds."""
    file = values.file
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    scaling = Values(file, values.mapping(name), f"{name}.")
    rope_type = scaling.get("rope_type") or scaling.get("type", "default")
    if not isinstance(rope_type, str) or rope_type not in REQUIRED_ROPE_PARAMETERS:
        known = ", ".join(REQUIRED_ROPE_PARAMETERS)
        raise CheckpointError(f"{file}: rope_type {named(rope_type)} is not supported; these are: {known}")
    if scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{file}: partial_rotary_factor other than 1 is not supported")
    for key in REQUIRED_ROPE_PARAMETERS[rope_type]:
        if key not in scaling:
            raise CheckpointError(f"{file}: rope_type {rope_type} needs {key}")
    theta = (scaling if "rope_theta" in scaling else values).number("rope_theta", 10000.0, least=2, most=1e30)
    parameters = _rope_parameters(rope_type, scaling, head_dim)
    if rope_type in ("llama3", "yarn", "longrope"):
        # A top-level value has precedence over the one among the parameters (Phi-3 writes it there).
        key = "original_max_position_embeddings"
        context = values.whole("max_position_embeddings", most=MAX_CONTEXT)
        parameters[key] = (values if key in values else scaling).whole(key, context, least=2, most=MAX_CONTEXT)
    return check_rope(
        RopeConfig(rope_type=cast(Any, rope_type), theta=theta, parameters=parameters), values, "rope factor"
    )


def check_rope(rope: RopeConfig, values: Values, name: str, key: str = "max_position_embeddings") -> RopeConfig:
    """Refuse a `factor`, called `name`, that extends the context beyond all measure."""
    length = rope.parameters.get("original_max_position_embeddings", values.get(key))
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
