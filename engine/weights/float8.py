"""Weights of float8, as they are stored or rounded at load."""

from collections.abc import Sequence

import torch
from torch import Tensor

from configs.errors import CheckpointError
from engine.checkpoints import StoredTensor
from engine.kernels.quantised import Float8Weight

from .dequantise import dequantise, stored_rows
from .staging import Placement


def read_float8(parts: Sequence[StoredTensor], placement: Placement) -> Float8Weight:
    """The rows of all parts, each with one scale for each row or one for all, one below the other; without loss."""
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=placement.device)
    scales, begin = [], 0
    for part in parts:
        own = numbers[begin : begin + part.shape[0]]
        begin += part.shape[0]
        for piece, (host,) in placement.pieces((own, torch.uint8)):
            host.numpy()[:] = stored_rows(part, piece)
        assert part.scale is not None, part.name
        scale = torch.from_numpy(dequantise(part.scale.tensor, slice(0, part.scale.tensor.shape[0])))
        scales.append(scale[:, 0].expand(part.shape[0]))
    return Float8Weight(numbers.view(torch.float8_e4m3fn), torch.cat(scales).to(placement.device))


def round_float8(weight: Tensor, parts: Sequence[StoredTensor]) -> Float8Weight:
    """`weight` [rows, columns] is made of `parts`. Raises CheckpointError where it is not finite."""
    rounded = Float8Weight.round(weight)
    if not rounded.scale.isfinite().all():
        names = ", ".join(part.stored_name for part in parts)
        raise CheckpointError(
            f"{parts[0].file}: tensor {names}: a weight is not finite; --quantization none takes it as it is"
        )
    return rounded
