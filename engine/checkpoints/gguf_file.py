"""A GGUF file as a Checkpoint: names, shapes and row order become Hugging Face's."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from configs.errors import CheckpointError
from engine.models.config import ModelConfig

from .checkpoint import Checkpoint, StoredTensor
from .families import BY_GGUF
from .family import GGUF_CONSTANTS, GGUF_KEYS, Family
from .gguf_reader import GGUFContents, read_gguf
from .gguf_rope import ROPE_TENSORS, gguf_rope
from .gguf_vocabulary import read_vocabulary
from .hf_config import common_config
from .known_keys import unknown_note
from .rotary_rows import in_kernels_order
from .values import Values, named

PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Sizes that some architectures give as an array; they have to be equal."""

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
    family = _family(parts[0][0], metadata)
    values = _own_values(parts[0][0], metadata, family)
    tensors = _named_tensors(parts, family)
    config = _config(values, family, tensors)
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
        pooling="mean" if values.get("pooling_type") == MEAN else "last",
        notes=tuple(unknown_note(values, config.architecture)),
        tensors=in_kernels_order(network, config, family, is_interleaved=family.gguf_is_interleaved),
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


def _config(values: Values, family: Family, tensors: dict[str, StoredTensor]) -> ModelConfig:
    embedding = tensors.get(f"{family.names['embed'][0]}.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{values.file}: tensor token_embd.weight is missing")
    _refuse_unsupported(values)
    head_dim = values.whole("head_dim", values.whole("hidden_size") // values.whole("num_attention_heads"), least=4)
    if head_dim % 2 or values.whole("attention.value_length", head_dim) != head_dim:
        raise values.refusal("attention.value_length", f"the even size of keys, {head_dim}, is needed")
    rotary_dim = values.whole("rope.dimension_count", head_dim, least=2)
    if rotary_dim != head_dim and (not family.turns_in_part or rotary_dim > head_dim):
        raise CheckpointError(f"{values.file}: rotary embedding of a part of the head is not supported")

    def has_bias(part: str) -> bool:
        return part in family.names and f"{family.names[part][0].replace('N', '0')}.bias" in tensors

    config = common_config(
        values,
        family,
        rope=gguf_rope(values, tensors, rotary_dim),
        rotary_dim=rotary_dim,
        vocab_size=embedding.shape[0],
        tie_word_embeddings=f"{family.names['head'][0]}.weight" not in tensors,
        dtype=DTYPE_NAMES.get(max(tensors.values(), key=lambda tensor: tensor.num_bytes).dtype, QUANTISED_DTYPE),
    )
    own = family.read(values, config) | {
        "attention_bias": has_bias("q") or has_bias("qkv"),
        "output_bias": has_bias("output"),
        "mlp_bias": has_bias("up") or has_bias("gate_up"),
        "norm_offset": 0.0,  # the weights in the file hold it
    }
    return msgspec.structs.replace(config, **own)


def _family(file: Path, metadata: dict[str, Any]) -> Family:
    arch = Values(file, metadata).get("general.architecture", "unknown")
    if not isinstance(arch, str) or arch not in BY_GGUF:
        known = ", ".join(BY_GGUF)
        raise CheckpointError(f"{file}: architecture {named(arch)} is not supported; these are: {known}")
    return BY_GGUF[arch]


def _own_values(file: Path, metadata: dict[str, Any], family: Family) -> Values:
    """The metadata whose keys begin with the architecture's name."""
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in PER_LAYER:
        if isinstance(sizes := own.get(key), list):
            if not sizes or any(size != sizes[0] for size in sizes):
                raise CheckpointError(f"{file}: {prefix}{key} differs from layer to layer, which is not supported")
            own[key] = sizes[0]
    if own.get("attention.sliding_window") == 0:  # none
        del own["attention.sliding_window"]
    names = {key: family.keys.get(key, key) for key in GGUF_CONSTANTS}
    constants = {key: family.defaults[name] for key, name in names.items() if name in family.defaults}
    values = Values(file, {**constants, **family.gguf_defaults} | own, prefix, GGUF_KEYS)
    values.is_gguf = True
    return values


def _refuse_unsupported(values: Values) -> None:
    if values.whole("expert_count", 0, least=0):
        raise CheckpointError(f"{values.file}: mixtures of experts are not supported")
    if not values.flag("attention.causal", True):
        raise values.refusal("attention.causal", "only causal attention is supported")
    if values.whole("pooling_type", NO_POOLING, least=0) not in (NO_POOLING, MEAN, LAST):
        raise values.refusal("pooling_type", f"{MEAN} (mean) or {LAST} (last) is needed")
    if values.number("rope.scaling.yarn_ext_factor", 1.0, least=-1) != 1.0:
        raise values.refusal("rope.scaling.yarn_ext_factor", "only 1 is supported")


def _named_tensors(parts: list[tuple[Path, GGUFContents]], family: Family) -> dict[str, StoredTensor]:
    """All tensors by Hugging Face's names; divisors of rotary frequencies keep GGUF's."""
    found: dict[str, StoredTensor] = {}
    modules = {own: hf for hf, own in family.names.values()}
    for file, contents in parts:
        for stored_name, tensor in contents.tensors.items():
            name = stored_name if stored_name in ROPE_TENSORS else _hf_name(stored_name, modules)
            if name is None:
                raise CheckpointError(f"{file}: tensor {named(stored_name)} is superfluous: no such part is known")
            if name in found:
                raise CheckpointError(f"{file}: tensor {stored_name} is there twice")
            read = partial(_whole, tensor.data)
            found[name] = StoredTensor(name, file, stored_name, tensor.shape, tensor.dtype, tensor.data.size, read)
    return found


def _whole(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return data


def _hf_name(stored_name: str, modules: dict[str, str]) -> str | None:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    module, _, kind = stored_name.rpartition(".")
    parts = module.split(".")
    layer = parts[1] if parts[0] == "blk" and len(parts) == 3 else ""
    template = modules.get(module.replace(f".{layer}.", ".N.", 1) if layer else module)
    return f"{template.replace('N', layer)}.{kind}" if template and kind in ("weight", "bias") else None
