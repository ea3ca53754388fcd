"""What tells one family of networks from another: a record that both readers of checkpoints use, and the loader.

A record says how the family's configuration is read and what its tensors are called. All keys are those of Hugging
Face's config.json; GGUF's metadata is read through `GGUF_KEYS`, which knows its names for the same.

engine/checkpoints/families/ has one file for each; a new one is found there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.models.config import ModelConfig, RopeConfig

from .rope_values import parse_rope
from .values import MAX_LAYERS, Values

Names = dict[str, tuple[str, str]]
"""Part of the network -> its module in Hugging Face's and in GGUF's files. N is the layer; .weight or .bias follows.

Parts are the fields of `LayerWeights` and `DecoderWeights`, but for fused ones that are stored apart: q, k and v for
qkv, gate and up for gate_up. A norm that is not named is not there; nor are learned positions.
"""

LLAMA_NAMES: Names = {
    "embed": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
    "input_norm": ("model.layers.N.input_layernorm", "blk.N.attn_norm"),
    "q": ("model.layers.N.self_attn.q_proj", "blk.N.attn_q"),
    "k": ("model.layers.N.self_attn.k_proj", "blk.N.attn_k"),
    "v": ("model.layers.N.self_attn.v_proj", "blk.N.attn_v"),
    "output": ("model.layers.N.self_attn.o_proj", "blk.N.attn_output"),
    "post_attention_norm": ("model.layers.N.post_attention_layernorm", "blk.N.ffn_norm"),
    "gate": ("model.layers.N.mlp.gate_proj", "blk.N.ffn_gate"),
    "up": ("model.layers.N.mlp.up_proj", "blk.N.ffn_up"),
    "down": ("model.layers.N.mlp.down_proj", "blk.N.ffn_down"),
}

QK_NORM: Names = {
    "q_norm": ("model.layers.N.self_attn.q_norm", "blk.N.attn_q_norm"),
    "k_norm": ("model.layers.N.self_attn.k_norm", "blk.N.attn_k_norm"),
}

FUSED_QKV: Names = {"qkv": ("model.layers.N.self_attn.qkv_proj", "blk.N.attn_qkv")}

FUSED_GATE_UP: Names = {"gate_up": ("model.layers.N.mlp.gate_up_proj", "blk.N.ffn_up")}

OUTPUT_NORMS: Names = {
    "attention_output_norm": ("model.layers.N.post_attention_layernorm", "blk.N.post_attention_norm"),
    "mlp_output_norm": ("model.layers.N.post_feedforward_layernorm", "blk.N.post_ffw_norm"),
}
"""Of what attention and MLP add to the residual stream."""


def without(names: Names, *parts: str) -> Names:
    return {part: name for part, name in names.items() if part not in parts}


GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""Hugging Face's key -> GGUF's, without the architecture's prefix; keys that are not here have the same name."""

GGUF_CONSTANTS = ("hidden_act", "hidden_activation")
"""Defaults that hold for GGUF as well: its metadata does not tell them."""

ONE_KV_HEAD_EACH = {"num_key_value_heads": "num_attention_heads"}
"""For `Family.keys`: every query head has keys and values of its own."""

GPT_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
"""For `Family.keys`, in the manner of GPT-2."""


def same(values: Values, config: ModelConfig) -> dict[str, Any]:
    """The common configuration, as it is."""
    return {}


@dataclass(frozen=True)
class Family:
    name: str
    """What Hugging Face's architectures begin with, as Llama of LlamaForCausalLM."""
    models: str
    """Models that people know, for docs/models.md."""
    gguf: tuple[str, ...] = ()
    """GGUF's names of the architecture."""
    names: Names = field(default_factory=lambda: LLAMA_NAMES)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What config.json means where it leaves a key out, by the file's names."""
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    """By GGUF's keys; nothing of `defaults` but GGUF_CONSTANTS holds there."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """Fields of LayerForm"""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """and of ModelConfig that all networks of the family have alike."""
    read: Callable[[Values, ModelConfig], dict[str, Any]] = same
    """The values of a configuration and what is common to all families -> fields of ModelConfig that differ."""
    eps: str = "rms_norm_eps"
    """Key of what norms add to the variance."""
    is_interleaved: bool = False
    """Whether neighbours of a stored head turn together, as (0, 1); else those half a head apart, as (0, d / 2)."""
    gguf_is_interleaved: bool = False
    also: tuple[str, ...] = ()
    """Other names of the same architecture."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Key -> what this family's config.json calls it, where that differs."""
    mlp_ratio: int | None = None
    """What intermediate_size is in hidden sizes, where it is left out."""
    transposed: tuple[str, ...] = ()
    """Parts that Hugging Face's files have as [columns, rows]."""
    qkv_by_head: bool = False
    """Whether Hugging Face's files have q, k and v of one head after those of another in the fused tensor."""

    @property
    def turns_in_part(self) -> bool:
        """Whether `partial_rotary_factor`, which is among the defaults then, is honoured."""
        key = "partial_rotary_factor"
        return self.keys.get(key, key) in self.defaults


def layer_types(
    values: Values, config: ModelConfig, pattern: int | None = None, by_place: Sequence[str] | None = None
) -> list[str]:
    """Of each layer full_attention or sliding_attention. Where the file does not tell, they are `by_place`; without
    it, every `pattern`-th layer is full, or (None) no layer is.
    """
    num_layers, key = config.num_layers, "sliding_window_pattern"
    own = values.get(key)
    if by_place is None:
        if pattern is not None and own is not None and "layer_types" not in values:
            pattern = 1 if isinstance(own, list) else values.whole(key, most=MAX_LAYERS)
        is_full = [pattern is not None and (i + 1) % pattern == 0 for i in range(num_layers)]
        if isinstance(own, list):  # GGUF: whether each layer has a window
            is_full = [not has_window for has_window in own]
        by_place = ["full_attention" if full else "sliding_attention" for full in is_full]
    kinds = values.get("layer_types", list(by_place))
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise values.refusal("layer_types", f"sliding_attention or full_attention for each of {num_layers} layers")
    return list(kinds)


def windows(values: Values, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """`sliding_windows` of ModelConfig."""
    if "sliding_window" not in values or "sliding_attention" not in kinds:
        return ()
    window = values.whole("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def windowed(values: Values, config: ModelConfig, pattern: int | None = None) -> dict[str, Any]:
    """Windows where the file has one."""
    if "sliding_window" not in values:
        return {}
    return {"sliding_windows": windows(values, layer_types(values, config, pattern))}


def biases(values: Values) -> dict[str, Any]:
    """One flag for all biases of attention."""
    has_bias = values.flag("attention_bias")
    return {"attention_bias": has_bias, "output_bias": has_bias}


def local_rope(values: Values, config: ModelConfig, kinds: Sequence[str], theta: float) -> dict[str, Any]:
    """Layers with a window turn by rotary parameters of their own."""
    if "sliding_attention" not in kinds:
        return {}
    dim, key = config.rotary_dim or config.head_dim, "rope_local_base_freq"
    rope = parse_rope(values, dim, kind="sliding_attention", theta_key=key, theta=theta)
    return other_rope(config, rope, [kind == "sliding_attention" for kind in kinds])


def other_rope(config: ModelConfig, rope: RopeConfig, has_it: Sequence[bool]) -> dict[str, Any]:
    """`rope` in the layers that have it."""
    return {"other_ropes": (rope,), "rope_indices": tuple(map(int, has_it))} if any(has_it) else {}
