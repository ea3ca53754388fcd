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
    num_mtp_layers: int = 0
    """Stored behind the others to predict further tokens; not part of the network here."""
    dtype: str = "float32"
    """Type of the checkpoint's weights."""
    has_head: bool = True
    """False: the network has none for the next token, so that it only embeds; the embedding stands in its place."""

    def window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None


def rope_cache_key(config: ModelConfig, num_prompt_tokens: int) -> str:
    """Two requests may share the KV of equal prefixes only with equal keys.

    Dynamic and longrope frequencies depend on the length of the whole prompt, so the keys that were rotated for one
    length do not serve another. "" for every other kind, and for prompts within the original context.
    """
    parameters = config.rope.parameters
    match config.rope.rope_type:
        case "dynamic" if num_prompt_tokens > config.max_position_embeddings:
            return f"rope-length={num_prompt_tokens}"
        case "longrope" if parameters["short_factor"] == parameters["long_factor"]:
            return ""
        case "longrope" if num_prompt_tokens > parameters["original_max_position_embeddings"]:
            return "rope=long"
        case _:
            return ""
