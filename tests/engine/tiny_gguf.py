"""Writes transformers' tiny models as GGUF files, as llama.cpp's converter would."""

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

Kind = gguf.GGMLQuantizationType

ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "gpt_neox": "gptneox",
    "phi": "phi2",
    "ministral3": "mistral3",
}
"""GGUF's names where they are not transformers'."""

PERMUTED = ("llama", "granite", "smollm3", "arcee", "mistral3")
"""Architectures of whose q and k the converter moves the rows."""

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Weights that transformers has as [columns, rows]."""

METADATA = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
}
"""GGUF's keys of some families -> transformers'."""

# Bytes of a block that hold its float16 scales; the rest is free to be random.
SCALE_BYTES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q2_K: (80, 82), Kind.Q3_K: (108,)}


@cache
def module_names(arch: str) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(next(key for key, own in gguf.MODEL_ARCH_NAMES.items() if own == arch), 64)


def gguf_name(name: str, arch: str) -> str:
    """By the tables of llama.cpp's own package."""
    module, _, kind = name.rpartition(".")
    found = module_names(arch).get_name(module)
    assert found is not None, name
    return f"{found}.{kind}"


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """What the converter writes, without the architecture's prefix."""
    config = model.config
    ropes = getattr(config, "rope_parameters", {})
    rope = ropes.get("full_attention", ropes)
    mlp_size = config.n_inner or 4 * config.hidden_size if hasattr(config, "n_inner") else config.intermediate_size
    mlp_size = getattr(config, "ffn_hidden_size", None) or mlp_size
    num_heads = config.num_attention_heads
    num_kv_heads = num_heads if config.model_type in ("gpt_neox", "gpt2") else config.num_key_value_heads
    if config.model_type == "falcon":
        num_kv_heads = 1
    entries = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": mlp_size,
        "attention.head_count": num_heads,
        "attention.head_count_kv": num_kv_heads,
        "attention.key_length": head_dim(model),
        "attention.value_length": head_dim(model),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        "rope.dimension_count": int(head_dim(model) * rope.get("partial_rotary_factor", 1.0)),
    }
    for key in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if hasattr(config, key):
            entries["attention.layer_norm_epsilon"] = getattr(config, key)
    entries |= {key: getattr(config, own) for key, own in METADATA.items() if getattr(config, own, None) is not None}
    scale = getattr(config, "logits_scaling", getattr(config, "logit_scale", None))
    return entries | {"logit_scale": scale}


def quantised(values: npt.NDArray[np.float32], kind: Kind) -> npt.NDArray[Any]:
    """Bytes of `values`; for the types that the package cannot write, random blocks of the same shape."""
    if kind not in SCALE_BYTES:
        return gguf.quantize(values, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.size // elements, size), dtype=np.uint8)
    for offset in SCALE_BYTES[kind]:
        scales = rng.uniform(1e-4, 2e-4, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(len(values), -1)


def interleave_rotary_rows(values: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """The converter's permutation of Llama's q and k rows."""
    halves = values.reshape(len(values) // head_dim, 2, head_dim // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Kind = Kind.F32,
    *,
    kinds: dict[str, Kind] | None = None,
    metadata: dict[str, Any] | None = None,
    top_metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    split: int = 0,
) -> None:
    """Matrices in `kind`, or as `kinds` says by Hugging Face name. `model` gets the weights that the file stands for.

    `metadata` has keys without the architecture's prefix, `top_metadata` whole ones; None removes an entry.
    With `split`, the file is cut into that many, as NAME-00001-of-00003.gguf.
    """
    arch = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    num_tensors = len(list(model.named_parameters()))
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=-(-num_tensors // split) if split else 0)
    entries = metadata_of(model) | (metadata or {})
    for key, value in entries.items():
        add_value(writer, f"{arch}.{key}", value)
    for key, value in (top_metadata or {}).items():
        add_value(writer, key, value)
    for name, parameter in model.named_parameters():
        own_kind = (kinds or {}).get(name, kind) if parameter.ndim == 2 else Kind.F32
        data = quantised(parameter.detach().numpy(), own_kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(gguf.dequantize(data, own_kind).reshape(parameter.shape)))
        if model.config.model_type == "gpt2" and name.endswith(CONV1D):
            data = data.T.copy()
        if arch == "gptneox" and "query_key_value" in name:  # by head in transformers' files
            by_head = data.reshape(model.config.num_attention_heads, 3, head_dim(model), -1)
            data = by_head.swapaxes(0, 1).reshape(data.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        if arch in PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
            data = interleave_rotary_rows(data, head_dim(model))
        writer.add_tensor(gguf_name(name, arch), data, raw_dtype=own_kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def head_dim(model: PreTrainedModel) -> int:
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
