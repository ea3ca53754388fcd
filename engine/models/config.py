"""`ModelConfig`: the shape of a decoder-only GQA + RoPE network, whatever file it came from. Imports no torch."""

from typing import Any, Literal

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (arXiv 2104.09864) and its extensions."""

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    theta: float = 10000.0
    parameters: dict[str, Any] = {}
    """The scaling parameters of `rope_type`, named as in Hugging Face's `rope_parameters`."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes count elements. `num_kv_heads` divides `num_heads`."""

    architecture: str
    """Hugging Face's name, e.g. LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    """Biases on q, k and v."""
    output_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Per-head RMSNorm of q and k before RoPE (Qwen3)."""
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: tokens that a query sees, itself included; None sees all. Empty means None for every layer."""
    dtype: str = "float32"
    """Type of the checkpoint's weights."""
    hidden_act: Literal["silu"] = "silu"

    def window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None
