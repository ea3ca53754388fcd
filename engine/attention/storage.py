"""Memory of the KV cache."""

import math
import mmap

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on a CPU, take memory and time only when they are first written.

    torch.zeros writes the whole cache, gigabytes at start; the kernel hands out zero pages anyway.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
