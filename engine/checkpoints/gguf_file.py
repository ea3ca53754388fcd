"""A GGUF file as a Checkpoint: names, shapes and row order become Hugging Face's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import CheckpointError
from engine.models.config import ModelConfig, RopeConfig

from .checkpoint import Checkpoint, StoredTensor
from .gguf_reader import GGUFContents, GGUFTensor, read_gguf

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# GGUF's module name -> Hugging Face's; `.weight` or `.bias` follows. N is the layer.
MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.N.attn_norm": "model.layers.N.input_layernorm",
    "blk.N.attn_q": "model.layers.N.self_attn.q_proj",
    "blk.N.attn_k": "model.layers.N.self_attn.k_proj",
    "blk.N.attn_v": "model.layers.N.self_attn.v_proj",
    "blk.N.attn_output": "model.layers.N.self_attn.o_proj",
    "blk.N.attn_q_norm": "model.layers.N.self_attn.q_norm",
    "blk.N.attn_k_norm": "model.layers.N.self_attn.k_norm",
    "blk.N.ffn_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.ffn_gate": "model.layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "model.layers.N.mlp.up_proj",
    "blk.N.ffn_down": "model.layers.N.mlp.down_proj",
}

# Divisors of rotary frequencies: part of the configuration, not of the network's weights.
ROPE_FREQS, ROPE_SHORT, ROPE_LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"

DTYPE_NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTISED_DTYPE = "bfloat16"
"""Quantised weights have no float type of their own; this one costs the least beside their own error."""


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokenizer of a GGUF file. List positions are token ids."""

    model: str
    """gpt2 (byte-level BPE) or llama (SentencePiece)."""
    pre: str
    """Which regular expression splits text before BPE."""
    tokens: list[str]
    scores: list[float]
    token_types: list[int]
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    merges: list[str]
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    add_bos_token: bool | None
    """None: the file does not say."""
    add_eos_token: bool | None
    add_space_prefix: bool | None


def open_gguf(file: Path) -> Checkpoint:
    """Raises CheckpointError when the file is cut or malformed, or its architecture or a tensor is not known."""
    contents = read_gguf(file)
    metadata = contents.metadata
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{file}: one part of {metadata['split.count']}; merge them first (llama-gguf-split --merge)"
        )
    config = _config(file, contents)
    vocabulary = _vocabulary(metadata)
    ids = (vocabulary.eos_token_id, metadata.get("tokenizer.ggml.eot_token_id"))
    return Checkpoint(
        path=file,
        name=file.stem,
        config=config,
        generation_config={},
        eos_token_ids=tuple(dict.fromkeys(i for i in ids if i is not None)),
        tokenizer_source=vocabulary,
        chat_template=metadata.get("tokenizer.chat_template"),
        tensors=_named_tensors(file, contents, config),
    )


def _config(file: Path, contents: GGUFContents) -> ModelConfig:
    metadata, tensors = contents.metadata, contents.tensors
    arch = metadata.get("general.architecture", "unknown")
    if arch not in ARCHITECTURES:
        raise CheckpointError(f"{file}: architecture {arch} is not supported; these are: {', '.join(ARCHITECTURES)}")
    if metadata.get(f"{arch}.expert_count"):
        raise CheckpointError(f"{file}: mixtures of experts are not supported")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file}: tensor token_embd.weight is missing")
    values = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    try:
        hidden_size, num_heads = values["embedding_length"], _uniform(file, values, "attention.head_count")
        num_layers = values["block_count"]
        head_dim = values.get("attention.key_length", hidden_size // num_heads)
        if values.get("attention.value_length", head_dim) != head_dim:
            raise CheckpointError(f"{file}: attention.value_length other than {head_dim} is not supported")
        window = values.get("attention.sliding_window")
        return ModelConfig(
            architecture=ARCHITECTURES[arch],
            vocab_size=tensors["token_embd.weight"].shape[0],
            hidden_size=hidden_size,
            intermediate_size=_uniform(file, values, "feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_uniform(file, {"attention.head_count_kv": num_heads} | values, "attention.head_count_kv"),
            head_dim=head_dim,
            max_position_embeddings=values["context_length"],
            rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
            rope=_rope(file, values, tensors, head_dim),
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm=arch == "qwen3",
            sliding_windows=(window,) * num_layers if window else (),
            dtype=DTYPE_NAMES.get(max(tensors.values(), key=lambda tensor: tensor.data.size).dtype, QUANTISED_DTYPE),
        )
    except KeyError as error:
        raise CheckpointError(f"{file}: {arch}.{error.args[0]} is missing") from None


def _uniform(file: Path, values: dict[str, Any], key: str) -> int:
    """A size that some architectures give per layer, as an array."""
    sizes = values[key] if isinstance(values[key], list) else [values[key]]
    if len(set(sizes)) != 1:
        raise CheckpointError(f"{file}: {key} differs from layer to layer, which is not supported")
    return int(sizes[0])


def _rope(file: Path, values: dict[str, Any], tensors: dict[str, GGUFTensor], head_dim: int) -> RopeConfig:
    theta, context_length = values.get("rope.freq_base", 10000.0), values["context_length"]
    if values.get("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{file}: rotary embedding of a part of the head is not supported")
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    original = values.get("rope.scaling.original_context_length", context_length)
    if ROPE_LONG in tensors:
        factors = {"short_factor": _floats(tensors[ROPE_SHORT]), "long_factor": _floats(tensors[ROPE_LONG])}
        attention_factor = values.get("rope.scaling.attn_factor")
        return _longrope(theta, factors, original, context_length / original, attention_factor)
    if ROPE_FREQS in tensors:
        # Llama 3's scaling, stored as its result: divisors that hold at every length.
        divisors = _floats(tensors[ROPE_FREQS])
        return _longrope(theta, {"short_factor": divisors, "long_factor": divisors}, original, 1.0, 1.0)
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(rope_type="linear", theta=theta, parameters={"factor": factor})
    if kind != "yarn":
        raise CheckpointError(f"{file}: rope.scaling.type {kind} is not supported")
    names = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    parameters = {name: values[key] for name, key in names.items() if key in values}
    parameters |= {"factor": factor, "original_max_position_embeddings": original}
    return RopeConfig(rope_type="yarn", theta=theta, parameters=parameters)


def _longrope(
    theta: float, factors: dict[str, list[float]], original: int, factor: float, attention_factor: float | None
) -> RopeConfig:
    parameters: dict[str, Any] = factors | {"factor": factor, "original_max_position_embeddings": original}
    if attention_factor is not None:
        parameters["attention_factor"] = attention_factor
    return RopeConfig(rope_type="longrope", theta=theta, parameters=parameters)


def _floats(tensor: GGUFTensor) -> list[float]:
    assert tensor.dtype == "F32", tensor.dtype
    return [float(value) for value in tensor.data.view(np.float32)]


def _vocabulary(metadata: dict[str, Any]) -> GGUFVocabulary:
    values = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    tokens = values.get("tokens", [])
    return GGUFVocabulary(
        model=values.get("model", ""),
        pre=values.get("pre", "default"),
        tokens=tokens,
        scores=values.get("scores", []),
        token_types=values.get("token_type", [1] * len(tokens)),
        merges=values.get("merges", []),
        bos_token_id=values.get("bos_token_id"),
        eos_token_id=values.get("eos_token_id"),
        unk_token_id=values.get("unknown_token_id"),
        pad_token_id=values.get("padding_token_id"),
        add_bos_token=values.get("add_bos_token"),
        add_eos_token=values.get("add_eos_token"),
        add_space_prefix=values.get("add_space_prefix"),
    )


def _named_tensors(file: Path, contents: GGUFContents, config: ModelConfig) -> dict[str, StoredTensor]:
    named = {}
    for stored_name, tensor in contents.tensors.items():
        if stored_name in (ROPE_FREQS, ROPE_SHORT, ROPE_LONG):
            continue
        name = _hf_name(stored_name)
        if name is None:
            raise CheckpointError(
                f"{file}: tensor {stored_name} is superfluous: {config.architecture} has no such part"
            )
        data = tensor.data
        if config.architecture == "LlamaForCausalLM" and name.split(".")[-2] in ("q_proj", "k_proj"):
            data = _in_half_order(data, config.head_dim, tensor.shape[0])
        named[name] = StoredTensor(name, file, stored_name, tensor.shape, tensor.dtype, data)
    return named


def _hf_name(stored_name: str) -> str | None:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    module, _, kind = stored_name.rpartition(".")
    parts = module.split(".")
    layer = parts[1] if parts[0] == "blk" and len(parts) == 3 else ""
    template = MODULE_NAMES.get(module.replace(f".{layer}.", ".N.", 1) if layer else module)
    return f"{template.replace('N', layer)}.{kind}" if template and kind in ("weight", "bias") else None


def _in_half_order(data: np.ndarray, head_dim: int, num_rows: int) -> np.ndarray:
    """Undo GGUF's row order of Llama's q and k. Whole rows move, so quantised rows stay as they are.

    A head's rows in GGUF:          0, d/2, 1, d/2 + 1, …   (rotary pairs are neighbours)
    and in Hugging Face's files:    0, 1, …, d/2, d/2 + 1, … (rotary pairs are half a head apart)
    """
    paired = data.reshape(num_rows // head_dim, head_dim // 2, 2, -1)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(-1)
