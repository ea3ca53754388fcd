"""Fills the network from a checkpoint, once: every parameter exactly one time, and nothing left over."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from configs.errors import CheckpointError
from engine.checkpoints import Checkpoint
from engine.kernels.ops import LayerWeights, Ops
from engine.models.decoder import Decoder, DecoderWeights

from .dequantise import read_into
from .mapping import Module, may_be_left_over, modules

PROGRESS_AFTER_SECONDS = 1.0


def load_decoder(checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """Raises CheckpointError, before anything is read, when a tensor is missing, superfluous or of another shape."""
    config = checkpoint.config
    wanted = list(modules(config))
    _check(checkpoint, wanted)
    loaded = _load_all(checkpoint, ops, wanted, dtype, torch.device(device))
    layers = [LayerWeights(**{"q_norm": None, "k_norm": None} | loaded[layer]) for layer in range(config.num_layers)]
    top = loaded[None]
    if config.tie_word_embeddings:
        top["head"] = ops.pack("head", top["embed"], None)
    num_parameters = sum(torch.Size(shape).numel() for module in wanted for _, shape in module.tensors())
    return Decoder(config, ops, DecoderWeights(layers=layers, num_parameters=num_parameters, **top))


def _check(checkpoint: Checkpoint, wanted: list[Module]) -> None:
    shapes = {name: shape for module in wanted for name, shape in module.tensors()}
    for name, shape in shapes.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {name} is missing")
        if stored.shape != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.stored_name} has shape {list(stored.shape)}, "
                f"the configuration asks for {list(shape)}"
            )
    for name, stored in checkpoint.tensors.items():
        if name not in shapes and not may_be_left_over(name, checkpoint.config):
            raise CheckpointError(
                f"{stored.file}: tensor {stored.stored_name} is superfluous: the configuration has no place for it"
            )


def _load_all(
    checkpoint: Checkpoint, ops: Ops, wanted: list[Module], dtype: torch.dtype, device: torch.device
) -> dict[int | None, dict[str, Any]]:
    """Layer (None: outside the layers) -> field -> value. The largest modules go first, so that no thread ends late."""

    def load(module: Module) -> Any:
        weight = _stack(checkpoint, module, "weight", dtype, device)
        if not module.is_linear:
            return weight
        bias = _stack(checkpoint, module, "bias", dtype, device) if module.has_bias else None
        return ops.pack(module.field, weight, bias)

    def num_bytes(module: Module) -> int:
        return sum(checkpoint.tensors[name].data.size for name, _ in module.tensors())

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


def _stack(checkpoint: Checkpoint, module: Module, kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    parts = [checkpoint.tensors[f"{name}.{kind}"] for name in module.stored]
    rows = sum(part.shape[0] for part in parts)
    out = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype, device=device)
    begin = 0
    for part in parts:
        end = begin + part.shape[0]
        read_into(out[begin:end], part)
        begin = end
    assert begin == rows
    return out
