"""`ModelConfig`: the shape of a decoder-only network, whatever file it came from. Imports no torch."""

from typing import Any, Literal

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (arXiv 2104.09864) and its extensions."""

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "none"] = "default"
    """none: positions turn nothing (NoPE)."""
    theta: float = 10000.0
    parameters: dict[str, Any] = {}
    """The scaling parameters of `rope_type`, named as in Hugging Face's `rope_parameters`."""


NOPE = RopeConfig(rope_type="none")

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class LayerForm(msgspec.Struct, frozen=True, kw_only=True):
    """What every layer computes around its attention. Which norms there are is told by the weights that it has."""

    layer_norm: bool = False
    """LayerNorm (arXiv 1607.06450) in place of RMSNorm."""
    is_parallel: bool = False
    """Attention and MLP read the same residual stream, and both are added to it; else one reads what the other left."""
    activation: Activation = "silu"
    """gelu_tanh is gelu's approximation (arXiv 1606.08415), relu2 the square of relu."""
    is_gated: bool = True
    """The MLP is down(activation(gate) * up), else down(activation(up))."""


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
    """Norm of q and k before RoPE, of each head (Qwen3)"""
    full_qk_norm: bool = False
    """or of all heads together (OLMo 2)."""
    form: LayerForm = LayerForm()
    norm_offset: float = 0.0
    """What stored norm weights have to be increased by (Gemma)."""
    norm_bias: bool = False
    """Biases on the layers' and the final norm."""
    head_bias: bool = False
    learned_positions: int = 0
    """Rows of a table that is added to the embeddings,"""
    position_offset: int = 0
    """in which position 0 is this row."""
    context_limit: int | None = None
    """Most tokens of a request, where it is less than positions allow."""
    rotary_dim: int | None = None
    """Elements of a head that turn; None: all. The rest lies behind them in stored heads."""
    other_ropes: tuple[RopeConfig, ...] = ()
    """Beside `rope`."""
    rope_indices: tuple[int, ...] = ()
    """Per layer: 0 for `rope`, i + 1 for `other_ropes[i]`. Empty means `rope` for every layer."""
    attention_scale: float | None = None
    """Of the product of query and key; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Unless 0, scores become softcap * tanh(score / softcap); likewise the logits with theirs."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
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

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope, *self.other_ropes)

    def rope_index(self, layer: int) -> int:
        return self.rope_indices[layer] if self.rope_indices else 0

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


def rope_cache_key(config: ModelConfig, num_prompt_tokens: int) -> str:
    """Two requests may share the KV of equal prefixes only with equal keys.

    Dynamic and longrope frequencies depend on the length of the whole prompt, so the keys that were rotated for one
    length do not serve another. "" for every other kind, and for prompts within the original context.
    """
    return ",".join(filter(None, (_rope_key(rope, config, num_prompt_tokens) for rope in config.ropes)))


def _rope_key(rope: RopeConfig, config: ModelConfig, num_prompt_tokens: int) -> str:
    parameters = rope.parameters
    match rope.rope_type:
        case "dynamic" if num_prompt_tokens > config.max_position_embeddings:
            return f"rope-length={num_prompt_tokens}"
        case "longrope" if parameters["short_factor"] == parameters["long_factor"]:
            return ""
        case "longrope" if num_prompt_tokens > parameters["original_max_position_embeddings"]:
            return "rope=long"
        case _:
            return ""
