"""Host arrays to the device and back, without waiting: copies are queued behind the work that is queued already."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: kernels load vectors of so many."""


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on `device`, by one copy for all of them; on a CPU they share the arrays' memory.

    The staging memory is pinned, and torch hands it out again only when the copy is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]).tolist()
    staging = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
    bytes_of = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        bytes_of[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = staging.to(device, non_blocking=True)
    dtypes = (torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays)
    return [
        copied[offset : offset + array.nbytes].view(dtype).view(array.shape)
        for array, offset, dtype in zip(arrays, offsets, dtypes, strict=False)
    ]


class Download:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._host = dict(tensors)
        self._done: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> dict[str, np.ndarray]:
        """The arrays, once they are here; work that was queued later is not waited for."""
        if self._done is not None:
            self._done.synchronize()
        return {name: tensor.numpy() for name, tensor in self._host.items()}
