"""Kernels of the layer operations; imported by `select_ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cpu.build import KernelsUnavailable

if TYPE_CHECKING:
    import torch

    from engine.models.config import ModelConfig

    from .ops import Ops


def select_ops(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, compiled: bool = False
) -> tuple[Ops, list[str]]:
    """The fastest operations for this machine, and notes on what is lost where they are not to be had; `compiled` takes
    torch's, compiled by torch.
    """
    import torch

    from .torch_ops import TorchOps

    shape: dict[str, Any] = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "norm_eps": config.rms_norm_eps,
        "form": config.form,
    }
    if compiled:
        from .compiled import CompiledOps

        return CompiledOps(**shape), []
    try:
        if device.type == "cuda":
            return _triton_ops(device, shape), []
        if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
            from .cpu.ops import CPUOps

            return CPUOps(**shape, dtype=dtype), []
    except (ImportError, KernelsUnavailable) as error:
        return TorchOps(**shape), [f"slower layer operations (torch's): {error}"]
    return TorchOps(**shape), []


def _triton_ops(device: torch.device, shape: dict[str, Any]) -> Ops:
    """Raises `KernelsUnavailable` where the device is too old, ImportError without Triton."""
    import torch

    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        found = ".".join(map(str, capability))
        raise KernelsUnavailable(f"the Triton kernels need compute capability 8.0, and the device has {found}")
    from .gpu.ops import TritonOps

    return TritonOps(**shape)
