"""Kernels of the layer operations; imported by `select_ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.models.config import ModelConfig

    from .ops import Ops


def select_ops(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Ops, list[str]]:
    """The fastest operations for this machine, and notes on what is lost where they are not to be had."""
    import torch

    from .cpu.build import KernelsUnavailable
    from .torch_ops import TorchOps

    shape = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "norm_eps": config.rms_norm_eps,
    }
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchOps(**shape), []
    try:
        from .cpu.ops import CPUOps

        return CPUOps(**shape, dtype=dtype), []
    except KernelsUnavailable as error:
        return TorchOps(**shape), [f"slower layer operations (torch's): {error}"]
