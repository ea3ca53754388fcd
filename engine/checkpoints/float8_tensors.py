"""Checkpoints of float8 weights: each has numbers beside it that scale it, in one of three layouts.

    weight_scale      one number, or one for each row      (quant_method fp8, compressed-tensors)
    weight_scale_inv  one for each block of 128 x 128      (quant_method fp8 with weight_block_size; it multiplies too)

Scales of activations are left out: activations are not rounded, or by scales of their own.
"""

import math
from dataclasses import replace

from configs.errors import CheckpointError

from .checkpoint import Scale, StoredTensor
from .values import MAX_SIZE, Values, named

METHODS = ("fp8", "compressed-tensors")
KIND = "F8_E4M3"


def check_quantization(quantization: Values) -> None:
    """`quantization` is quantization_config of config.json. Raises CheckpointError unless it means float8."""
    method = named(quantization.get("quant_method", "unknown"))
    groups = quantization.mapping("config_groups")
    weights = [Values(quantization.file, Values(quantization.file, groups).mapping(name)) for name in groups]
    weights = [Values(quantization.file, group.mapping("weights")) for group in weights]
    kinds = [f"{named(weight.get('type', '?'))}{named(weight.get('num_bits', '?'))}" for weight in weights]
    if method not in METHODS or any(kind != "float8" for kind in kinds):
        found = ", ".join([method, *kinds])
        raise CheckpointError(
            f"{quantization.file}: quantization_config ({found}) is not supported; float8 is, and for other quantised "
            "weights GGUF"
        )


def with_scales(tensors: dict[str, StoredTensor], quantization: Values) -> dict[str, StoredTensor]:
    """`tensors` with the scales in the weights that they belong to. Raises CheckpointError where one does not fit."""
    scaled = {name: tensor for name, tensor in tensors.items() if tensor.dtype == KIND}
    found = dict(tensors)
    for name, tensor in scaled.items():
        module = name.removesuffix(".weight")
        scales = [found.pop(key) for key in (f"{module}.weight_scale", f"{module}.weight_scale_inv") if key in found]
        if len(scales) != 1 or len(tensor.shape) != 2:
            raise CheckpointError(f"{tensor.file}: tensor {name} of type {KIND} has no weight_scale")
        found[name] = replace(tensor, scale=_scale(tensor, scales[0], quantization))
        found.pop(f"{module}.input_scale", None)
    return found


def _scale(tensor: StoredTensor, scale: StoredTensor, quantization: Values) -> Scale:
    rows, columns = tensor.shape
    blocks = {(1, 1): (rows, columns), (rows, 1): (1, columns)}
    if "weight_block_size" in quantization:
        high, wide = map(int, quantization.numbers("weight_block_size", 2, least=1, most=MAX_SIZE))
        blocks[-(-rows // high), -(-columns // wide)] = (high, wide)
    shape = scale.shape if len(scale.shape) == 2 else (math.prod(scale.shape), 1)
    if shape not in blocks or scale.dtype == KIND or scale.read is None:
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name} of shape {list(scale.shape)} does not fit a weight of {rows} rows and "
            f"{columns} columns"
        )
    return Scale(replace(scale, shape=shape), blocks[shape])
