"""A GGUF file as a Checkpoint: names, shapes and row order become Hugging Face's."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.errors import CheckpointError
from engine.models.config import ModelConfig, RopeConfig

from .checkpoint import Checkpoint, StoredTensor
from .gguf_reader import GGUFContents, read_gguf
from .gguf_vocabulary import read_vocabulary
from .hf_config import MAX_FACTOR, MIN_FACTOR, check_rope
from .values import MAX_CONTEXT, MAX_LAYERS, Values, named

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
ROPE_TENSORS = ROPE_FREQS, ROPE_SHORT, ROPE_LONG = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)

NO_POOLING, MEAN, LAST = 0, 1, 3
"""Values of `pooling_type` in GGUF's metadata."""

SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})$")

DTYPE_NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTISED_DTYPE = "bfloat16"
"""Quantised weights have no float type of their own; this one costs the least beside their own error."""


def open_gguf(file: Path) -> Checkpoint:
    """Raises CheckpointError when the file is cut or malformed, or its architecture or a tensor is not known.

    Any part of a split file stands for the whole.
    """
    parts = _parts(file)
    metadata = parts[0][1].metadata
    tensors = _named_tensors(parts)
    config = _config(parts[0][0], metadata, tensors)
    network = {name: tensor for name, tensor in tensors.items() if name not in ROPE_TENSORS}
    own = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    vocabulary, eos_token_ids = read_vocabulary(Values(parts[0][0], own, "tokenizer."))
    return Checkpoint(
        path=file,
        name=SPLIT_NAME.sub("", file.stem),
        config=config,
        generation_config={},
        eos_token_ids=eos_token_ids,
        tokenizer_source=vocabulary,
        chat_templates=_chat_templates(metadata),
        pooling="mean" if _own_values(parts[0][0], metadata).get("pooling_type") == MEAN else "last",
        tensors={name: replace(tensor, row_order=_row_order(config, tensor)) for name, tensor in network.items()},
    )


def _parts(file: Path) -> list[tuple[Path, GGUFContents]]:
    """The files of a checkpoint, as model-00001-of-00003.gguf and its two neighbours, the first of them first."""
    contents = read_gguf(file)
    count = Values(file, contents.metadata).whole("split.count", 1, least=0, most=10_000)
    if count <= 1:
        return [(file, contents)]
    name = SPLIT_NAME.search(file.stem)
    if name is None or int(name[2]) != count:
        raise CheckpointError(f"{file}: one part of {count}, whose name does not end in -00001-of-{count:05}.gguf")
    stem = file.stem[: name.start()]
    files = [file.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    return [(part, contents if part == file else read_gguf(part)) for part in files]


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    if key in metadata:
        found["default"] = metadata[key]
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _config(file: Path, metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> ModelConfig:
    arch = Values(file, metadata).get("general.architecture", "unknown")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file}: architecture {named(arch)} is not supported; these are: {known}")
    values = _own_values(file, metadata)
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file}: tensor token_embd.weight is missing")
    _refuse_unsupported(values)
    hidden_size, num_heads = values.whole("embedding_length"), _uniform(values, "attention.head_count")
    num_kv_heads = _uniform(values, "attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise values.refusal("attention.head_count_kv", f"a divisor of {num_heads} is needed")
    num_layers = values.whole("block_count", most=MAX_LAYERS)
    head_dim = values.whole("attention.key_length", hidden_size // num_heads, least=4, most=2**16)
    if head_dim % 2 or values.whole("attention.value_length", head_dim) != head_dim:
        raise values.refusal("attention.value_length", f"the even size of keys, {head_dim}, is needed")
    window = values.whole("attention.sliding_window", 0, least=0)
    return ModelConfig(
        architecture=ARCHITECTURES[arch],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_uniform(values, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=values.whole("context_length", most=MAX_CONTEXT),
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon", most=1),
        rope=_rope(values, tensors, head_dim),
        tie_word_embeddings="lm_head.weight" not in tensors,
        attention_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
        output_bias="model.layers.0.self_attn.o_proj.bias" in tensors,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in tensors,
        qk_norm=arch == "qwen3",
        sliding_windows=(window,) * num_layers if window else (),
        dtype=DTYPE_NAMES.get(max(tensors.values(), key=lambda tensor: tensor.num_bytes).dtype, QUANTISED_DTYPE),
    )


def _own_values(file: Path, metadata: dict[str, Any]) -> Values:
    """The metadata whose keys begin with the architecture's name."""
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return Values(file, own, prefix)


def _refuse_unsupported(values: Values) -> None:
    if values.whole("expert_count", 0, least=0):
        raise CheckpointError(f"{values.file}: mixtures of experts are not supported")
    if not values.flag("attention.causal", True):
        raise values.refusal("attention.causal", "only causal attention is supported")
    if values.whole("pooling_type", NO_POOLING, least=0) not in (NO_POOLING, MEAN, LAST):
        raise values.refusal("pooling_type", f"{MEAN} (mean) or {LAST} (last) is needed")
    if values.number("rope.scaling.yarn_ext_factor", 1.0, least=-1) != 1.0:
        raise values.refusal("rope.scaling.yarn_ext_factor", "only 1 is supported")


def _uniform(values: Values, key: str, default: int | None = None) -> int:
    """A size that some architectures give per layer, as an array."""
    given = values.get(key)
    if not isinstance(given, list):
        return values.whole(key, default)
    if not given or any(size != given[0] for size in given):
        raise CheckpointError(f"{values.file}: {key} differs from layer to layer, which is not supported")
    return Values(values.file, {key: given[0]}).whole(key)


def _rope(values: Values, tensors: dict[str, StoredTensor], head_dim: int) -> RopeConfig:
    if values.whole("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{values.file}: rotary embedding of a part of the head is not supported")
    theta = values.number("rope.freq_base", 10000.0, least=2, most=1e30)
    context_length = values.whole("context_length", most=MAX_CONTEXT)
    original = values.whole("rope.scaling.original_context_length", context_length, least=2, most=MAX_CONTEXT)
    scale = {"least": MIN_FACTOR, "most": MAX_FACTOR}
    attention_factor = values.number("rope.scaling.attn_factor", 1.0, **scale)
    if ROPE_LONG in tensors:
        names = {"short_factor": ROPE_SHORT, "long_factor": ROPE_LONG}
        factors = {key: _divisors(values.file, tensors, name, head_dim) for key, name in names.items()}
        own = attention_factor if "rope.scaling.attn_factor" in values else None
        return _longrope(theta, factors, original, context_length / original, own)
    if ROPE_FREQS in tensors:
        # Llama 3's scaling, stored as its result: divisors that hold at every length.
        divisors = _divisors(values.file, tensors, ROPE_FREQS, head_dim)
        return _longrope(theta, {"short_factor": divisors, "long_factor": divisors}, original, 1.0, 1.0)
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factor = values.number("rope.scaling.factor", values.number("rope.scale_linear", 1.0, **scale), **scale)
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta)
    if kind == "linear":
        rope = RopeConfig(rope_type="linear", theta=theta, parameters={"factor": factor})
    elif kind == "yarn":
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        parameters: dict[str, Any] = {name: values.number(key) for name, key in betas.items() if key in values}
        parameters |= {"factor": factor, "original_max_position_embeddings": original}
        rope = RopeConfig(rope_type="yarn", theta=theta, parameters=parameters)
        if attention_factor != 1.0:  # of its own, beside the one of YaRN
            parameters["attention_factor"] = attention_factor * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    else:
        raise CheckpointError(f"{values.file}: rope.scaling.type {named(kind)} is not supported")
    return check_rope(rope, values, "rope.scaling.factor", "context_length")


def _longrope(
    theta: float, factors: dict[str, list[float]], original: int, factor: float, attention_factor: float | None
) -> RopeConfig:
    parameters: dict[str, Any] = factors | {"factor": factor, "original_max_position_embeddings": original}
    if attention_factor is not None:
        parameters["attention_factor"] = attention_factor
    return RopeConfig(rope_type="longrope", theta=theta, parameters=parameters)


def _divisors(file: Path, tensors: dict[str, StoredTensor], name: str, head_dim: int) -> list[float]:
    tensor = tensors.get(name)
    if tensor is None or tensor.read is None or (tensor.dtype, tensor.shape) != ("F32", (head_dim // 2,)):
        raise CheckpointError(f"{file}: tensor {name} with {head_dim // 2} numbers of type F32 is missing")
    floats = tensor.read().view(np.float32)
    if not (np.isfinite(floats) & (floats > 0)).all():
        raise CheckpointError(f"{tensor.file}: tensor {name} holds what is no factor")
    return [float(value) for value in floats]


def _named_tensors(parts: list[tuple[Path, GGUFContents]]) -> dict[str, StoredTensor]:
    """All tensors by Hugging Face's names; divisors of rotary frequencies keep GGUF's."""
    found: dict[str, StoredTensor] = {}
    for file, contents in parts:
        for stored_name, tensor in contents.tensors.items():
            name = stored_name if stored_name in ROPE_TENSORS else _hf_name(stored_name)
            if name is None:
                raise CheckpointError(f"{file}: tensor {named(stored_name)} is superfluous: no such part is known")
            if name in found:
                raise CheckpointError(f"{file}: tensor {stored_name} is there twice")
            read = partial(_whole, tensor.data)
            found[name] = StoredTensor(name, file, stored_name, tensor.shape, tensor.dtype, tensor.data.size, read)
    return found


def _whole(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return data


def _hf_name(stored_name: str) -> str | None:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    module, _, kind = stored_name.rpartition(".")
    parts = module.split(".")
    layer = parts[1] if parts[0] == "blk" and len(parts) == 3 else ""
    template = MODULE_NAMES.get(module.replace(f".{layer}.", ".N.", 1) if layer else module)
    return f"{template.replace('N', layer)}.{kind}" if template and kind in ("weight", "bias") else None


def _row_order(config: ModelConfig, tensor: StoredTensor) -> npt.NDArray[np.int64] | None:
    """Where GGUF has the rows of Llama's q and k. Whole rows move, so quantised rows stay as they are.

    A head's rows in GGUF:          0, d/2, 1, d/2 + 1, …   (rotary pairs are neighbours)
    and in Hugging Face's files:    0, 1, …, d/2, d/2 + 1, … (rotary pairs are half a head apart)
    """
    is_rotated = tensor.name.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"))
    if config.architecture != "LlamaForCausalLM" or not is_rotated:
        return None
    if not tensor.shape or tensor.shape[0] % config.head_dim:  # which the network will refuse
        return None
    rows = np.arange(tensor.shape[0]).reshape(-1, config.head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
