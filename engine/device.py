"""The one place that asks torch about devices, and what settings are where the device decides."""

import torch

from configs.errors import SettingsError
from configs.settings import DEFAULT_BATCHED_TOKENS, DEFAULT_BLOCK_SIZE, EngineConfig

from . import machine

_DEFAULTS = {
    "cpu": {
        "block_size": DEFAULT_BLOCK_SIZE,
        "max_num_batched_tokens": DEFAULT_BATCHED_TOKENS,
        "kv_cache_memory_fraction": 0.25,
        "async_scheduling": False,
    },
    "cuda": {
        "block_size": 64,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_fraction": 0.9,
        "async_scheduling": True,
    },
}
"""A GPU serves nothing else as a rule, and its attention kernels read 64 tokens at a time."""

_NATIVE_BFLOAT16 = (8, 0)
"""First compute capability that multiplies bfloat16."""


def select_device(name: str) -> torch.device:
    """`auto` takes a GPU where there is one. Raises `SettingsError` for a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        reason = "torch finds no usable GPU" if torch.version.cuda else "this torch is built without CUDA"
        raise SettingsError(f"device cuda: {reason}")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


class ResolvedConfig(EngineConfig, frozen=True, kw_only=True):
    """Settings in which the device has decided what was left open."""

    block_size: int
    max_num_batched_tokens: int
    kv_cache_memory_fraction: float
    async_scheduling: bool


def resolved(config: EngineConfig, device: torch.device) -> ResolvedConfig:
    """`config` with the device's defaults for what was left open; `device` then names the type of `device`."""
    values = {name: getattr(config, name) for name in EngineConfig.__struct_fields__}
    values |= {name: value for name, value in _DEFAULTS[device.type].items() if values[name] is None}
    cuda_graphs = config.cuda_graphs and device.type == "cuda"
    return ResolvedConfig(**values | {"device": device.type, "cuda_graphs": cuda_graphs})


def device_name(device: torch.device) -> str:
    """For people: cpu, or cuda with the GPU's name."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU, such as (9, 0); (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def select_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> tuple[torch.dtype, list[str]]:
    """Type of weights, activations and KV cache, and notes for the start-up message.

    `auto` follows the checkpoint. A CPU then computes in bfloat16, checkpoints in float16 too, where it does so
    natively, and else in float32; a GPU before compute capability 8.0 computes in float16 instead of bfloat16. Raises
    `SettingsError` where a type that the device cannot compute in is asked for.
    """
    wanted, is_free = (checkpoint_dtype, True) if name == "auto" else (name, False)
    if device.type == "cpu":
        used, kind = _cpu_dtype(wanted, is_free), "CPU"
    else:
        used, kind = _gpu_dtype(wanted, is_free, device), "GPU"
    notes = [] if used == wanted else [f"dtype: this {kind} computes in {used} instead of {wanted}"]
    return getattr(torch, used), notes


def _cpu_dtype(wanted: str, is_free: bool) -> str:
    if not is_free:
        if wanted == "float16":
            raise SettingsError("dtype float16 needs a GPU; on a CPU take float32 or bfloat16")
        return wanted
    return "bfloat16" if wanted != "float32" and machine.has_native_bfloat16() else "float32"


def _gpu_dtype(wanted: str, is_free: bool, device: torch.device) -> str:
    if wanted != "bfloat16" or compute_capability(device) >= _NATIVE_BFLOAT16:
        return wanted
    if not is_free:
        raise SettingsError(f"dtype bfloat16: {device_name(device)} cannot compute in it; take float16 or float32")
    return "float16"


def set_threads(num_threads: int) -> None:
    """Threads of torch's operators."""
    torch.set_num_threads(num_threads)


def free_memory(device: torch.device) -> int:
    """Bytes that the KV cache could take at most. On a GPU: that the driver calls free, so without what torch keeps
    for itself of tensors that are gone."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return machine.free_memory()
