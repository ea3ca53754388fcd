"""Which stored tensors make up which parameter of the network. Names are Hugging Face's, as the family has them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from engine.checkpoints.families import family_of
from engine.checkpoints.family import QK_NORM
from engine.models.config import ModelConfig

Shape = tuple[int, ...]

BIASED_NORMS = ("final_norm", "input_norm", "post_attention_norm")


@dataclass(frozen=True)
class Module:
    """A parameter of `LayerWeights` or `DecoderWeights`: rows of the stored modules, one below the other."""

    field: str
    layer: int | None
    stored: dict[str, Shape]
    """Stored module -> shape of its weight."""
    is_linear: bool
    has_bias: bool = False
    """Of a linear layer, in the same field."""
    kind: str = "weight"
    """What is taken of the stored module; a norm's bias is a parameter of its own."""
    offset: float = 0.0
    """Added to what is stored."""

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Stored tensors and their shapes."""
        for name, shape in self.stored.items():
            yield f"{name}.{self.kind}", shape
            if self.has_bias:
                yield f"{name}.bias", shape[:1]


def modules(config: ModelConfig, *, embed_is_head: bool = False) -> Iterator[Module]:
    """Every parameter of the network; a tied head is made from what the embedding is made from, or is the embedding."""
    names = {part: hf for part, (hf, _) in family_of(config.architecture).names.items()}
    vocabulary = (config.vocab_size, config.hidden_size)
    if not embed_is_head:
        yield Module("embed", None, {names["embed"]: vocabulary}, is_linear=False)
    yield from _norm(config, "final_norm", None, names["final_norm"], config.hidden_size)
    head = names["embed" if config.tie_word_embeddings else "head"]
    yield Module("head", None, {head: vocabulary}, is_linear=True, has_bias=config.head_bias)
    if config.learned_positions:
        table: dict[str, Shape] = {names["positions"]: (config.learned_positions, config.hidden_size)}
        yield Module("positions", None, table, is_linear=False)
    for layer in range(config.num_layers):
        yield from _layer_modules(config, layer, names)


def _norm(config: ModelConfig, field: str, layer: int | None, module: str, size: int) -> Iterator[Module]:
    stored: dict[str, Shape] = {module.replace("N", str(layer)): (size,)}
    yield Module(field, layer, stored, is_linear=False, offset=config.norm_offset)
    if config.norm_bias and field in BIASED_NORMS:
        yield Module(f"{field}_bias", layer, stored, is_linear=False, kind="bias")


def _layer_modules(config: ModelConfig, layer: int, names: dict[str, str]) -> Iterator[Module]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = dict.fromkeys(("input_norm", "attention_output_norm", "post_attention_norm", "mlp_output_norm"), hidden)
    if config.qk_norm:
        norms |= {"q_norm": q, "k_norm": kv} if config.full_qk_norm else dict.fromkeys(QK_NORM, config.head_dim)
    for field, size in norms.items():
        if field in names:
            yield from _norm(config, field, layer, names[field], size)
    linears: list[tuple[str, dict[str, Shape], bool]] = [
        (
            "qkv",
            {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "qkv": (q + 2 * kv, hidden)},
            config.attention_bias,
        ),
        ("output", {"output": (hidden, q)}, config.output_bias),
        ("gate_up", {"gate": (mlp, hidden), "up": (mlp, hidden), "gate_up": (2 * mlp, hidden)}, config.mlp_bias),
        ("down", {"down": (hidden, mlp)}, config.mlp_bias),
    ]
    for field, shapes, has_bias in linears:
        stored = {names[part].replace("N", str(layer)): shape for part, shape in shapes.items() if part in names}
        yield Module(field, layer, stored, is_linear=True, has_bias=has_bias)


_WITHOUT_USE = re.compile(
    r".*\brotary_emb\.\w+"  # frequencies, sines and cosines are computed
    r"|.*\.self_attn\.(\w+\.)?(q|k|v|kv|prob|output)_scale"  # of a cache in float8; Octavo's makes its own
    r"|(model\.)?mtp(_layers)?\..*"  # predicts several tokens
    r"|.*\.(attn|attention)\.(masked_)?bias"  # masks
    r"|(model\.)?(vision_tower|vision_model|multi_modal_projector|audio_tower)\..*"  # of images and sounds
    r"|(model\.)?(score|classifier|v_head|value_head)\..*"  # heads of other tasks
)


def may_be_left_over(name: str, config: ModelConfig) -> bool:
    """As transformers does. A tied head is the embedding, whatever else is stored as `lm_head`."""
    if config.tie_word_embeddings and name == f"{family_of(config.architecture).names['head'][0]}.weight":
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    is_mtp = layer and config.num_layers <= int(layer[1]) < config.num_layers + config.num_mtp_layers
    return bool(is_mtp) or _WITHOUT_USE.fullmatch(name) is not None
