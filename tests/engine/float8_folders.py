"""Hugging Face folders whose linear layers are stored in float8, in the layouts that are found."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny_models import write_tiny

BLOCK = "block"
SIZE = (48, 40)
"""Rows and columns of a block: neither divides the weights' sizes."""

_GROUP = {"weights": {"type": "float", "num_bits": 8}, "targets": ["Linear"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "channel": {"quant_method": "compressed-tensors", "config_groups": {"group_0": _GROUP}, "ignore": ["lm_head"]},
    BLOCK: {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(SIZE)},
}


def write_float8(folder: Path, floats: Path, layout: str) -> dict[str, Tensor]:
    """Two folders of equal weights, in float8 and in floats; returns the tensors of the first."""
    for path in (folder, floats):
        path.mkdir()
        write_tiny(path, num_hidden_layers=2, tie_word_embeddings=False)
    tensors = load_file(floats / "model.safetensors")
    stored = dict(tensors)
    for name, weight in tensors.items():
        if "_proj" not in name:
            continue
        scale = _scale(weight, layout)
        wide = _widened(scale, weight.shape, layout)
        numbers = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name], tensors[name] = numbers, numbers.float() * wide
        if layout == "tensor":
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.5)
            scale = scale.reshape(())
        stored[f"{name}_scale{'_inv' * (layout == BLOCK)}"] = scale
    save(stored, folder)
    save(tensors, floats)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": LAYOUTS[layout]}))
    return stored


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors")


def _scale(weight: Tensor, layout: str) -> Tensor:
    if layout == "tensor":
        return weight.abs().max().reshape(1, 1) / 448
    if layout == "channel":
        return (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    rows = [part.split(SIZE[1], dim=1) for part in weight.split(SIZE[0])]
    return torch.stack([torch.stack([block.abs().max() for block in row]) for row in rows]) / 448


def _widened(scale: Tensor, shape: torch.Size, layout: str) -> Tensor:
    if layout != BLOCK:
        return scale.float().expand(shape)
    return scale.repeat_interleave(SIZE[0], 0).repeat_interleave(SIZE[1], 1)[: shape[0], : shape[1]]
