"""A Hugging Face folder: config.json, safetensors (one file, or shards through their index), tokenizer files."""

from pathlib import Path
from typing import Any

import msgspec

from configs.errors import CheckpointError

from .checkpoint import Checkpoint, StoredTensor, TokenizerFiles
from .float8_tensors import check_quantization, with_scales
from .hf_config import parse_config
from .safetensors_file import read_safetensors

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_REASON = (
    "pickle files can run any code while they load and are refused; "
    "convert the checkpoint to safetensors (transformers: model.save_pretrained)"
)
OWN_CODE = "the checkpoint names code of its own (auto_map), which is never run"

DTYPE_NAMES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "bfloat16"}


def open_hf_folder(folder: Path) -> Checkpoint:
    """Raises CheckpointError when a file is missing, cut or malformed, or the architecture is unknown."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{folder}: no config.json" + _gguf_hint(folder))
    raw_config = read_json(config_file)
    quantization = raw_config.get("quantization_config") or {}
    if quantization:
        check_quantization(quantization, config_file)
    tensors = with_scales(_read_tensors(folder), quantization)
    largest = max(tensors.values(), key=lambda tensor: tensor.data.size, default=None)
    stored_dtype = DTYPE_NAMES[largest.dtype] if largest else "float32"
    generation_config = read_json(folder / "generation_config.json", missing_ok=True)
    tokenizer_config = read_json(folder / "tokenizer_config.json", missing_ok=True)
    return Checkpoint(
        path=folder,
        name=folder.resolve().name,
        config=parse_config(raw_config, config_file, stored_dtype),
        generation_config=generation_config,
        eos_token_ids=_eos_token_ids(folder, generation_config, raw_config, tokenizer_config),
        tokenizer_source=TokenizerFiles(folder, tokenizer_config),
        chat_template=_chat_template(folder, tokenizer_config),
        tensors=tensors,
        notes=(OWN_CODE,) if "auto_map" in raw_config or "auto_map" in tokenizer_config else (),
    )


def read_json(file: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} when it is missing and may be."""
    if missing_ok and not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None


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


def _eos_token_ids(folder: Path, *sources: dict[str, Any]) -> tuple[int, ...]:
    """Union of `eos_token_id` of the generation config and config, and the tokenizer's own `eos_token`."""
    generation_config, config, tokenizer_config = sources
    ids: list[int] = []
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    tokenizer_eos = _token_id(folder, tokenizer_config.get("eos_token"), tokenizer_config)
    if tokenizer_eos is not None:
        ids.append(tokenizer_eos)
    return tuple(dict.fromkeys(ids))


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerJSON(msgspec.Struct):
    added_tokens: list[_AddedToken] = []
    model: _Vocabulary = _Vocabulary()


def _token_id(folder: Path, token: Any, tokenizer_config: dict[str, Any]) -> int | None:
    """Id of a token given as text or as a dictionary with `content`; None when the tokenizer does not know it."""
    content = token.get("content") if isinstance(token, dict) else token
    if not content:
        return None
    for token_id, added in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        if added.get("content") == content:
            return int(token_id)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_TokenizerJSON)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None
    for entry in tokenizer.added_tokens:
        if entry.content == content:
            return entry.id
    return tokenizer.model.vocab.get(content) if isinstance(tokenizer.model.vocab, dict) else None


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """A chat_template.jinja file has precedence over the template in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template
