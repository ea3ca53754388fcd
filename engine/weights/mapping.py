"""Which stored tensors make up which parameter of the network. Names are Hugging Face's."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.config import ModelConfig

Shape = tuple[int, ...]

EMBED, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


@dataclass(frozen=True)
class Module:
    """A parameter of `LayerWeights` or `DecoderWeights`: rows of the stored modules, one below the other."""

    field: str
    layer: int | None
    stored: dict[str, Shape]
    """Stored module -> shape of its weight."""
    is_linear: bool
    has_bias: bool = False

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Stored tensors and their shapes."""
        for name, shape in self.stored.items():
            yield f"{name}.weight", shape
            if self.has_bias:
                yield f"{name}.bias", shape[:1]


def modules(config: ModelConfig, *, embed_is_head: bool = False) -> Iterator[Module]:
    """Every parameter of the network; a tied head is made from what the embedding is made from, or is the embedding."""
    vocabulary = (config.vocab_size, config.hidden_size)
    if not embed_is_head:
        yield Module("embed", None, {EMBED: vocabulary}, is_linear=False)
    yield Module("final_norm", None, {FINAL_NORM: (config.hidden_size,)}, is_linear=False)
    yield Module("head", None, {EMBED if config.tie_word_embeddings else HEAD: vocabulary}, is_linear=True)
    for layer in range(config.num_layers):
        yield from _layer_modules(config, layer)


def _layer_modules(config: ModelConfig, layer: int) -> Iterator[Module]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def norm(field: str, name: str, size: int) -> Module:
        return Module(field, layer, {f"model.layers.{layer}.{name}": (size,)}, is_linear=False)

    def linear(field: str, shapes: dict[str, Shape], has_bias: bool) -> Module:
        stored = {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
        return Module(field, layer, stored, is_linear=True, has_bias=has_bias)

    yield norm("input_norm", "input_layernorm", hidden)
    qkv: dict[str, Shape] = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
    }
    yield linear("qkv", qkv, config.attention_bias)
    if config.qk_norm:
        yield norm("q_norm", "self_attn.q_norm", config.head_dim)
        yield norm("k_norm", "self_attn.k_norm", config.head_dim)
    yield linear("output", {"self_attn.o_proj": (hidden, q)}, config.output_bias)
    yield norm("post_attention_norm", "post_attention_layernorm", hidden)
    yield linear("gate_up", {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden)}, config.mlp_bias)
    yield linear("down", {"mlp.down_proj": (hidden, mlp)}, config.mlp_bias)


_WITHOUT_USE = re.compile(
    r".*\brotary_emb\.\w+"  # frequencies, sines and cosines are computed
    r"|.*\.self_attn\.(\w+\.)?(q|k|v|kv|prob|output)_scale"  # of a cache in float8; Octavo's makes its own
    r"|(model\.)?mtp(_layers)?\..*"  # predicts several tokens
    r"|(model\.)?(score|classifier|v_head|value_head)\..*"  # heads of other tasks
)


def may_be_left_over(name: str, config: ModelConfig) -> bool:
    """As transformers does. A tied head is the embedding, whatever else is stored as `lm_head`."""
    if config.tie_word_embeddings and name == f"{HEAD}.weight":
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    is_mtp = layer and config.num_layers <= int(layer[1]) < config.num_layers + config.num_mtp_layers
    return bool(is_mtp) or _WITHOUT_USE.fullmatch(name) is not None
