"""config.json of Hugging Face -> ModelConfig. A null means the default, as it does there."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import msgspec

from configs.errors import CheckpointError
from engine.models.config import Activation, LayerForm, ModelConfig, RopeConfig

from .families import FAMILIES
from .family import Family
from .known_keys import unknown_note
from .rope_values import parse_rope, rotary_dim
from .values import MAX_CONTEXT, MAX_LAYERS, Values, named

WITH_HEAD = "ForCausalLM"
WITH_HEAD_NAMES = (WITH_HEAD, "LMHeadModel")
NESTED = "ForConditionalGeneration"
"""Networks for images and text; where they say what their text part is, that one is served."""
BASES = ("Model", "ForSequenceClassification", "ForTokenClassification")
"""Kinds of networks without a head for the next token: what comes before it is served, for embeddings."""

ACTIVATIONS: dict[str, Activation] = {
    **{name: name for name in get_args(Activation)},
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Architecture:
    """What config.json says of the network's kind."""

    family: Family
    has_head: bool
    raw: dict[str, Any]
    """config.json, or the part of it that tells of the text."""
    is_nested: bool = False
    """Whether there are other parts, for images say."""


def find_architecture(raw: dict[str, Any], file: Path) -> Architecture:
    """`raw` is config.json. Raises CheckpointError for what is not supported."""
    model_type = str(raw.get("model_type", "")).removesuffix("_text").replace("_", "")
    own_type = [f"{family.name}{WITH_HEAD}" for family in FAMILIES if family.name.lower() == model_type]
    names = raw.get("architectures") or own_type or [model_type]
    names = names if isinstance(names, list) else [names]
    for name in names:
        for family in FAMILIES:
            for prefix in (family.name, *family.also):
                kind = str(name).removeprefix(prefix)
                if name == f"{prefix}{kind}" and kind in (*WITH_HEAD_NAMES, *BASES):
                    return Architecture(family, kind in WITH_HEAD_NAMES, raw)
        text = raw.get("text_config")
        if str(name).endswith(NESTED) and isinstance(text, dict):
            shared = {key: raw[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in raw}
            inner = find_architecture(shared | text | {"architectures": None}, file)
            return replace(inner, is_nested=True)
    own_code = ", and code of its own (auto_map) is never run" if "auto_map" in raw else ""
    known = ", ".join(family.name for family in FAMILIES)
    given = ", ".join(map(named, names[:3]))
    raise CheckpointError(
        f"{file}: architecture {given} is not supported{own_code}; these are, as LlamaForCausalLM: {known}"
    )


def parse_config(
    found: Architecture, file: Path, stored_dtype: str, *, has_head: bool
) -> tuple[ModelConfig, list[str]]:
    """`stored_dtype` is the type of the stored weights, used when config.json names none.

    `has_head` tells whether the file's names leave room for one. Also returns notes for the start-up message. Raises
    CheckpointError that names `file` and the key.
    """
    family = found.family
    # A null in the file removes the family's default: what is common to all families holds then.
    values = Values(file, {**family.defaults} | found.raw, own_names=family.keys)
    is_tied = values.flag("tie_word_embeddings")
    has_head = is_tied or (has_head and found.has_head)
    head_dim, dim = _head_dim(values), 0
    dim = rotary_dim(values, head_dim, may_be_partial=family.turns_in_part)
    config = common_config(
        values,
        family,
        rope=parse_rope(values, dim),
        rotary_dim=dim,
        vocab_size=values.whole("vocab_size"),
        tie_word_embeddings=is_tied or not has_head,
        has_head=has_head,
        num_mtp_layers=values.whole("num_nextn_predict_layers", 0, least=0, most=MAX_LAYERS),
        dtype=_dtype(values, stored_dtype),
    )
    config = msgspec.structs.replace(config, **family.read(values, config))
    notes = ["images and sounds are not served, but text is"] if found.is_nested else []
    if config.context_limit:
        notes.append(f"no more than {config.context_limit} tokens are served: behind, queries are scaled by position")
    return config, notes + unknown_note(values, config.architecture)


def common_config(values: Values, family: Family, *, rope: RopeConfig, rotary_dim: int, **given: Any) -> ModelConfig:
    """What all families have, from either kind of file; `given` are further fields."""
    num_heads = values.whole("num_attention_heads")
    num_kv_heads = values.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        names = values.name("num_attention_heads"), values.name("num_key_value_heads")
        raise CheckpointError(f"{values.file}: {names[0]} {num_heads} is no multiple of {names[1]} {num_kv_heads}")
    head_dim, hidden_size = _head_dim(values), values.whole("hidden_size")
    is_gated = "up" not in family.names or "gate" in family.names
    config = ModelConfig(
        architecture=f"{family.name}{WITH_HEAD}",
        hidden_size=hidden_size,
        intermediate_size=values.whole("intermediate_size", family.mlp_ratio and family.mlp_ratio * hidden_size),
        num_layers=values.whole("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=values.whole("max_position_embeddings", most=MAX_CONTEXT),
        rms_norm_eps=values.number(
            family.eps, None if values.is_gguf else family.defaults.get(family.eps, 1e-6), most=1
        ),
        rope=rope,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        qk_norm="q_norm" in family.names,
        form=LayerForm(activation=_activation(values), is_gated=is_gated, **family.form),
        **given,
    )
    return msgspec.structs.replace(config, **family.fields)


def _head_dim(values: Values) -> int:
    num_heads = values.whole("num_attention_heads")
    head_dim = values.whole("head_dim", values.whole("hidden_size") // num_heads, most=2**16)
    if head_dim % 2 or head_dim < 4:
        raise CheckpointError(
            f"{values.file}: {values.name('head_dim')} {head_dim} is not supported; even numbers from 4 are"
        )
    return head_dim


def _activation(values: Values) -> Activation:
    name = values.get("hidden_activation") or values.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise CheckpointError(f"{values.file}: hidden_act {named(name)} is not supported; these are: {known}")
    return ACTIVATIONS[name]


def _dtype(values: Values, stored_dtype: str) -> str:
    """`torch_dtype` is the name of transformers 4."""
    dtype = named(values.get("dtype", values.get("torch_dtype", stored_dtype))).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(f"{values.file}: dtype {dtype} is not supported; float32, float16 and bfloat16 are")
    return dtype
