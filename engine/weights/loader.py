"""Fills the network from a checkpoint, once: every parameter exactly one time, and nothing left over."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from configs.errors import CheckpointError
from engine.checkpoints import Checkpoint, StoredTensor
from engine.kernels.ops import LayerWeights, Ops
from engine.models.decoder import Decoder, DecoderWeights

from .dequantise import dequantise, read_into
from .float8 import read_float8, round_float8
from .mapping import Module, Shape, may_be_left_over, modules
from .precision import FLOATS, ROUNDED_FLOAT8, STORED_FLOAT8, Precision
from .quantise import read_quantised
from .staging import Placement, select_placement

PROGRESS_AFTER_SECONDS = 1.0


def load_decoder(
    checkpoint: Checkpoint,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    precision: Precision = FLOATS,
) -> Decoder:
    """Raises CheckpointError, before anything is read, when a tensor is missing, superfluous or of another shape."""
    config = checkpoint.config
    embed_is_head = config.tie_word_embeddings and ops.embeds_from_head
    wanted = list(modules(config, embed_is_head=embed_is_head))
    shapes = {name: shape for module in wanted for name, shape in module.tensors()}
    _check(checkpoint, shapes)
    loaded = _load_all(checkpoint, ops, wanted, precision, dtype, select_placement(torch.device(device)))
    if embed_is_head:
        loaded[None]["embed"] = loaded[None]["head"]
    layers = [LayerWeights(rope_index=config.rope_index(layer), **loaded[layer]) for layer in range(config.num_layers)]
    num_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    return Decoder(config, ops, DecoderWeights(layers=layers, num_parameters=num_parameters, **loaded[None]))


def _check(checkpoint: Checkpoint, shapes: dict[str, Shape]) -> None:
    for name, shape in shapes.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {name} is missing")
        if stored.read is None:
            raise CheckpointError(f"{stored.file}: tensor {stored.stored_name} has type {stored.dtype}: no served one")
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.stored_name} has shape {list(stored.shape)}, "
                f"the configuration asks for {list(shape)}"
            )
    for name, stored in checkpoint.tensors.items():
        if name not in shapes and not may_be_left_over(name, checkpoint.config) and not _changes_nothing(stored):
            raise CheckpointError(
                f"{stored.file}: tensor {stored.stored_name} is superfluous: the configuration has no place for it"
            )


def _changes_nothing(stored: StoredTensor) -> bool:
    """A buffer of whole numbers, or a bias of zeros."""
    if stored.read is None:
        return True
    return stored.name.endswith(".bias") and not dequantise(stored, slice(None)).any()


def left_out(checkpoint: Checkpoint) -> str:
    """Names of the tensors that `load_decoder` passes over, in one line; N stands for a number."""
    used = {name for module in modules(checkpoint.config) for name, _ in module.tensors()}
    names = (tensor.stored_name for name, tensor in checkpoint.tensors.items() if name not in used)
    return ", ".join(dict.fromkeys(re.sub(r"\d+", "N", name) for name in names))


def _load_all(
    checkpoint: Checkpoint,
    ops: Ops,
    wanted: list[Module],
    precision: Precision,
    dtype: torch.dtype,
    placement: Placement,
) -> dict[int | None, dict[str, Any]]:
    """Layer (None: outside the layers) -> field -> value. The largest modules go first, so that no thread ends late."""

    def load(module: Module) -> Any:
        def stack(kind: str) -> Tensor:
            return _stack([checkpoint.tensors[f"{name}.{kind}"] for name in module.stored], dtype, placement)

        if not module.is_linear:
            stacked = stack(module.kind)
            return stacked.add_(module.offset) if module.offset else stacked
        bias = stack("bias") if module.has_bias else None
        parts = [checkpoint.tensors[f"{name}.weight"] for name in module.stored]
        forms = precision.forms(checkpoint, module)
        if forms is None:
            return ops.pack(module.field, stack("weight"), bias)
        if forms[0] == STORED_FLOAT8:
            return ops.pack_float8(module.field, read_float8(parts, placement), bias)
        if forms[0] == ROUNDED_FLOAT8:
            return ops.pack_float8(module.field, round_float8(stack("weight"), parts), bias)
        weight = read_quantised(parts, forms, placement)
        if ops.packs_quantised:
            return ops.pack_quantised(module.field, weight, bias)
        return ops.pack(module.field, weight.dequantise().to(dtype), bias)

    def num_bytes(module: Module) -> int:
        return sum(checkpoint.tensors[name].num_bytes for name, _ in module.tensors())

    loaded: dict[int | None, dict[str, Any]] = {}
    wanted = sorted(wanted, key=num_bytes, reverse=True)
    bar = tqdm(
        desc="Loading weights",
        total=sum(map(num_bytes, wanted)),
        unit="B",
        unit_scale=True,
        leave=False,
        delay=PROGRESS_AFTER_SECONDS,
    )
    with bar, ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for module, value in zip(wanted, pool.map(load, wanted), strict=True):
            loaded.setdefault(module.layer, {})[module.field] = value
            bar.update(num_bytes(module))
    return loaded


def _stack(parts: list[StoredTensor], dtype: torch.dtype, placement: Placement) -> Tensor:
    rows = sum(part.shape[0] for part in parts)
    out = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype, device=placement.device)
    begin = 0
    for part in parts:
        end = begin + part.shape[0]
        read_into(out[begin:end], part, placement)
        begin = end
    assert begin == rows
    return out
