"""config.json of Hugging Face -> ModelConfig. A null means the default, as it does there.

Rotary parameters are accepted in both forms: `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters`
(transformers 5).
"""

from pathlib import Path
from typing import Any

import msgspec

from configs.errors import CheckpointError
from engine.models.config import ModelConfig, RopeConfig

# What each family assumes when config.json leaves a key out.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}

# Scaling parameters that a rotary type cannot do without.
REQUIRED_ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


def parse_config(raw: dict[str, Any], file: Path, stored_dtype: str) -> ModelConfig:
    """`raw` is config.json, `stored_dtype` the type of the stored weights, used when config.json names none.

    Raises CheckpointError that names `file` and the key.
    """
    architecture = _architecture(raw, file)
    # A null in the file removes the family's default: what is common to all families holds then.
    values = {key: value for key, value in (FAMILY_DEFAULTS[architecture] | raw).items() if value is not None}
    _refuse_unsupported(values, file)
    try:
        num_heads = values["num_attention_heads"]
        fields = {
            "architecture": architecture,
            "vocab_size": values["vocab_size"],
            "hidden_size": values["hidden_size"],
            "intermediate_size": values["intermediate_size"],
            "num_layers": values["num_hidden_layers"],
            "num_heads": num_heads,
            "num_kv_heads": values.get("num_key_value_heads", num_heads),
            "head_dim": values.get("head_dim", values["hidden_size"] // num_heads),
            "max_position_embeddings": values["max_position_embeddings"],
            "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
            "rope": parse_rope(values, file),
            "tie_word_embeddings": values.get("tie_word_embeddings", False),
            "qk_norm": architecture == "Qwen3ForCausalLM",
            "sliding_windows": _sliding_windows(architecture, values, file),
            "dtype": _dtype(values, file, stored_dtype),
        }
        config = msgspec.convert(fields | _biases(architecture, values), ModelConfig, from_attributes=True)
    except KeyError as error:
        raise CheckpointError(f"{file}: {error.args[0]} is missing") from None
    except (msgspec.ValidationError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{file}: num_attention_heads {config.num_heads} is no multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    return config


def _architecture(raw: dict[str, Any], file: Path) -> str:
    names = raw.get("architectures") or [f"{str(raw.get('model_type', '')).capitalize()}ForCausalLM"]
    for name in names:
        if name in FAMILY_DEFAULTS:
            return str(name)
    own_code = ", and code of its own (auto_map) is never run" if "auto_map" in raw else ""
    raise CheckpointError(
        f"{file}: architecture {', '.join(map(str, names))} is not supported{own_code};"
        f" these are: {', '.join(FAMILY_DEFAULTS)}"
    )


def _refuse_unsupported(values: dict[str, Any], file: Path) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{file}: hidden_act {values['hidden_act']} is not supported, only silu is")


def _dtype(values: dict[str, Any], file: Path, stored_dtype: str) -> str:
    """`torch_dtype` is the name of transformers 4."""
    dtype = str(values.get("dtype", values.get("torch_dtype", stored_dtype))).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(f"{file}: dtype {dtype} is not supported; float32, float16 and bfloat16 are")
    return dtype


def _biases(architecture: str, values: dict[str, Any]) -> dict[str, bool]:
    match architecture:
        case "Qwen2ForCausalLM":
            return {"attention_bias": True}
        case "MistralForCausalLM":
            return {}
        case _:
            attention = bool(values.get("attention_bias", False))
            mlp = architecture == "LlamaForCausalLM" and bool(values.get("mlp_bias", False))
            return {"attention_bias": attention, "output_bias": attention, "mlp_bias": mlp}


def _sliding_windows(architecture: str, values: dict[str, Any], file: Path) -> tuple[int | None, ...]:
    """One entry per layer, or () when every layer sees everything."""
    window, num_layers = values.get("sliding_window"), values["num_hidden_layers"]
    if architecture == "LlamaForCausalLM" or window is None:
        return ()
    if architecture == "MistralForCausalLM":
        return tuple([window] * num_layers)
    if not values.get("use_sliding_window", False):
        return ()
    first = values["max_window_layers"]
    kinds = values.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"{file}: layer_types must give sliding_attention or full_attention for each of {num_layers} layers"
        )
    windows: tuple[int | None, ...] = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def parse_rope(values: dict[str, Any], file: Path) -> RopeConfig:
    """`values` holds the keys of config.json that are not null."""
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    parameters = {key: value for key, value in scaling.items() if value is not None}
    rope_type = parameters.pop("rope_type", None) or parameters.get("type", "default")
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", values.get("rope_theta", 10000.0))
    if rope_type not in REQUIRED_ROPE_PARAMETERS:
        known = ", ".join(REQUIRED_ROPE_PARAMETERS)
        raise CheckpointError(f"{file}: rope_type {rope_type} is not supported; these are: {known}")
    if parameters.pop("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{file}: partial_rotary_factor other than 1 is not supported")
    if rope_type in ("llama3", "yarn", "longrope"):
        # A top-level value has precedence over the one among the parameters (Phi-3 writes it there).
        original = values.get("original_max_position_embeddings", parameters.get("original_max_position_embeddings"))
        parameters["original_max_position_embeddings"] = original or values["max_position_embeddings"]
    for key in REQUIRED_ROPE_PARAMETERS[rope_type]:
        if key not in parameters:
            raise CheckpointError(f"{file}: rope_type {rope_type} needs {key}")
    return RopeConfig(rope_type=rope_type, theta=float(theta), parameters=parameters)
