"""The one place that asks torch about devices."""

import torch

from configs.errors import SettingsError

from . import machine


def select_device(name: str) -> torch.device:
    """`auto` takes a GPU where there is one. Raises `SettingsError` for a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise SettingsError("device cuda: torch finds no usable GPU")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


def select_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> tuple[torch.dtype, list[str]]:
    """Type of weights, activations and KV cache, and notes for the start-up message.

    `auto` follows the checkpoint; a CPU computes in bfloat16 only where it does so natively, and never in
    float16. Raises `SettingsError` for float16 on a CPU.
    """
    if name != "auto":
        if name == "float16" and device.type == "cpu":
            raise SettingsError("dtype float16 needs a GPU; on a CPU take float32 or bfloat16")
        return getattr(torch, name), []
    if device.type != "cpu" or checkpoint_dtype == "float32":
        return getattr(torch, checkpoint_dtype), []
    if checkpoint_dtype == "bfloat16" and machine.has_native_bfloat16():
        return torch.bfloat16, []
    return torch.float32, [f"dtype: the checkpoint's {checkpoint_dtype} is computed in float32 on this CPU"]


def set_threads(num_threads: int) -> None:
    """Threads of torch's operators."""
    torch.set_num_threads(num_threads)


def free_memory(device: torch.device) -> int:
    """Bytes that the KV cache could take at most."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return machine.free_memory()
