"""A Hugging Face folder: config.json, safetensors (one file, or shards through their index), tokenizer files."""

from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Literal

import msgspec

from configs.errors import CheckpointError, InvalidRequest
from configs.sampling import SamplingParams

from .checkpoint import Checkpoint, StoredTensor, TokenizerFiles
from .family import Family
from .float8_tensors import check_quantization, with_scales
from .hf_config import find_architecture, parse_config
from .rotary_rows import in_kernels_order, transposed
from .safetensors_file import read_safetensors
from .values import Values, read_object, shown

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_REASON = (
    "pickle files can run any code while they load and are refused; "
    "convert the checkpoint to safetensors (transformers: model.save_pretrained)"
)
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Entries of generation_config.json that requests may leave out."""

POOLING = "pooling_mode_"

OWN_CODE = "the checkpoint names code of its own (auto_map), which is never run"

DTYPE_NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "bfloat16"}


def open_hf_folder(folder: Path) -> Checkpoint:
    """Raises CheckpointError when a file is missing, cut or malformed, or the architecture is unknown."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{folder}: no config.json" + _gguf_hint(folder))
    raw_config = read_object(config_file)
    architecture = find_architecture(raw_config, config_file)
    family = architecture.family
    raw_quantization = Values(config_file, raw_config).mapping("quantization_config")
    quantization = Values(config_file, raw_quantization, "quantization_config.")
    if raw_quantization:
        check_quantization(quantization)
    tensors, has_head = _with_prefix(_read_tensors(folder), family)
    tensors = with_scales(tensors, quantization)
    largest = max(tensors.values(), key=lambda tensor: tensor.num_bytes, default=None)
    stored_dtype = DTYPE_NAMES.get(largest.dtype, "float32") if largest else "float32"
    config, config_notes = parse_config(architecture, config_file, stored_dtype, has_head=has_head)
    generation_file = folder / "generation_config.json"
    generation_config, notes = _read_generation_config(generation_file)
    notes += config_notes
    ids = _token_ids(generation_config, generation_file, notes) + _token_ids(raw_config, config_file, notes)
    tokenizer_config = read_json(folder / "tokenizer_config.json", missing_ok=True)
    if "auto_map" in raw_config or "auto_map" in tokenizer_config:
        notes.append(OWN_CODE)
    if not config.has_head:
        notes.append("there is no language model's head: the checkpoint is served for embeddings only")
    return Checkpoint(
        path=folder,
        name=folder.resolve().name,
        config=config,
        generation_config=generation_config,
        eos_token_ids=tuple(dict.fromkeys(ids)),
        tokenizer_source=TokenizerFiles(folder, tokenizer_config),
        chat_templates=_chat_templates(folder, tokenizer_config, notes),
        tensors=in_kernels_order(
            transposed(tensors, family),
            config,
            family,
            is_interleaved=family.is_interleaved,
            by_head=family.qkv_by_head,
        ),
        pooling=_pooling(folder / "1_Pooling" / "config.json"),
        notes=tuple(notes),
    )


def read_json(file: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} when it is missing and may be."""
    return {} if missing_ok and not file.exists() else read_object(file)


def _gguf_hint(folder: Path) -> str:
    names = sorted(file.name for file in folder.glob("*.gguf"))
    return f"; name one of its GGUF files instead: {', '.join(names)}" if names else ""


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """An index, where there is one, decides alone which files are read: stray copies beside it are left alone."""
    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():
        return _read_shards(index_file)
    single = folder / "model.safetensors"
    if single.is_file():
        return read_safetensors(single)
    if any(file.suffix in PICKLE_SUFFIXES for file in folder.iterdir()):
        raise CheckpointError(f"{folder}: no model.safetensors; {PICKLE_REASON}")
    raise CheckpointError(f"{folder}: neither model.safetensors nor {index_file.name}")


def _read_shards(index_file: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file}: weight_map is missing or empty")
    for name in weight_map.values():
        if not isinstance(name, str) or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise CheckpointError(f"{index_file}: weight_map names {shown(name)}, which is no file of the folder")
    shards = {name: read_safetensors(index_file.parent / name) for name in sorted(set(weight_map.values()))}
    for tensor_name, shard_name in weight_map.items():
        if tensor_name not in shards[shard_name]:
            raise CheckpointError(
                f"{index_file.parent / shard_name}: tensor {tensor_name} is missing; the index names it"
            )
    for shard_name, shard in shards.items():
        for tensor_name in shard:
            if weight_map.get(tensor_name) != shard_name:
                raise CheckpointError(
                    f"{index_file.parent / shard_name}: tensor {tensor_name} is superfluous; the index has it not"
                )
    return {name: tensor for shard in shards.values() for name, tensor in shard.items()}


def _with_prefix(tensors: dict[str, StoredTensor], family: Family) -> tuple[dict[str, StoredTensor], bool]:
    """The tensors by the names of a network with a head, and whether their own names leave room for one.

    Networks without a head are stored without `model.`, as many embedding models are; those for images and text have
    another one around it.
    """
    first, _, embed = family.names["embed"][0].partition(".")
    head = family.names["head"][0]
    inner = {_without_wrapper(name, first): tensor for name, tensor in tensors.items()}
    is_bare = f"{embed}.weight" in inner
    if is_bare:
        others = (f"{head}.", "score.", "classifier.")
        inner = {name if name.startswith(others) else f"{first}.{name}": tensor for name, tensor in inner.items()}
    if inner.keys() == tensors.keys():
        return tensors, True
    renamed = {name: replace(tensor, name=name) for name, tensor in inner.items()}
    return renamed, not is_bare or f"{head}.weight" in inner


def _without_wrapper(name: str, first: str) -> str:
    """language_model.model.norm.weight and model.language_model.norm.weight -> model.norm.weight"""
    for wrapper, inner in (("language_model.", ""), ("model.language_model.", f"{first}.")):
        if name.startswith(wrapper):
            return inner + name.removeprefix(wrapper)
    return name


def _read_generation_config(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The file's values, and notes about those that are passed over as nothing can be sampled with them."""
    found, notes = read_json(file, missing_ok=True), []
    for name in SAMPLING_DEFAULTS:
        if found.get(name) is None:
            continue
        try:
            found[name] = getattr(msgspec.convert({name: found[name]}, SamplingParams), name)
        except (msgspec.ValidationError, InvalidRequest, ValueError):
            notes.append(f"{file}: {name} {shown(found.pop(name))} is out of range and passed over")
    return found, notes


def _token_ids(values: dict[str, Any], file: Path, notes: list[str]) -> tuple[int, ...]:
    """eos_token_id, which is one or a list."""
    given = values.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    known = tuple(value for value in ids if type(value) is int and 0 <= value < 2**31)
    if len(known) < len(ids):
        notes.append(f"{file}: eos_token_id {shown(given)} is no token id, and passed over")
    return known


def _pooling(file: Path) -> Literal["last", "mean"]:
    """From the file that sentence-transformers writes."""
    modes = [
        key for key, value in read_json(file, missing_ok=True).items() if key.startswith(POOLING) and value is True
    ]
    if modes == [f"{POOLING}mean_tokens"]:
        return "mean"
    if modes in ([], [f"{POOLING}lasttoken"]):
        return "last"
    raise CheckpointError(f"{file}: {', '.join(modes)} is not supported; {POOLING}mean_tokens and lasttoken are")


def _chat_templates(folder: Path, tokenizer_config: dict[str, Any], notes: list[str]) -> dict[str, str]:
    """Files of their own have precedence over tokenizer_config.json; the processors' chat_template.json comes last."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    try:
        found: Any = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    except (OSError, UnicodeDecodeError) as error:
        notes.append(f"{folder}: a chat template cannot be read ({error}): chats are refused")
        return {}
    legacy = folder / "chat_template.json"
    found = found or tokenizer_config.get("chat_template") or read_json(legacy, missing_ok=True).get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    elif not isinstance(found, dict):
        found = {} if found is None else {"default": found}
    if not all(isinstance(text, str) for entry in found.items() for text in entry):
        notes.append(f"{folder}: chat_template holds what is no text: chats are refused")
        return {}
    return dict(found)
