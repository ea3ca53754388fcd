"""From settings and a checkpoint to a network with its attention backend, before any cache is allocated."""

from dataclasses import dataclass

import torch

from configs.errors import UsageError
from configs.settings import EngineConfig

from .attention import select_backend
from .attention.metadata import AttentionBackend, AttentionSpec
from .checkpoints import Checkpoint
from .device import compute_capability, device_name, resolved, select_device, select_dtype
from .kernels import select_ops
from .models.decoder import Decoder
from .weights.loader import left_out, load_decoder
from .weights.precision import Precision, select_precision


@dataclass(frozen=True)
class LoadedModel:
    decoder: Decoder
    spec: AttentionSpec
    backend: AttentionBackend
    quantization: str
    """How the linear layers' weights are kept."""
    notes: list[str]
    """For the start-up message: what was passed over, and why."""


KV_CACHE_DTYPES = {
    "auto": None,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def load_model(config: EngineConfig, checkpoint: Checkpoint) -> LoadedModel:
    """Raises `UsageError` when settings, checkpoint and machine do not go together."""
    model = checkpoint.config
    device = select_device(config.device)
    config = resolved(config, device)
    dtype, dtype_notes = select_dtype(config.dtype, model.dtype, device)
    ops, ops_notes = select_ops(model, device, dtype, compiled=config.torch_compile)
    is_exact = config.dtype == "float32"  # and no mere fallback of a CPU
    precision, precision_notes = select_precision(
        config.quantization, ops, dtype, compute_capability(device), is_exact=is_exact
    )
    spec = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        device=device,
        block_size=config.block_size,
        windows=tuple(model.window(layer) for layer in range(model.num_layers)),
        scale=model.score_scale,
        softcap=model.attention_softcap,
        kv_cache_dtype=KV_CACHE_DTYPES[config.kv_cache_dtype],
        capability=compute_capability(device),
    )
    backend, backend_notes = select_backend(config.attention_backend, spec)
    try:
        decoder = load_decoder(checkpoint, ops, dtype, device, precision)
    except torch.OutOfMemoryError as error:
        mend = "a smaller checkpoint or quantization int8 or int4"
        raise UsageError(f"the weights do not fit the memory of {device_name(device)}; take {mend}") from error
    passed_over = left_out(checkpoint)
    left_out_notes = [f"left out of the network: {passed_over}"] if passed_over else []
    notes = [*checkpoint.notes, *left_out_notes, *dtype_notes, *ops_notes, *precision_notes, *backend_notes]
    stored = Precision("auto", precision.keeps_float8).describe(checkpoint)
    if is_exact and config.quantization == "auto" and stored != "none":
        notes.append(f"dtype float32 is exact: weights stored as {stored} are dequantised; dtype auto keeps them small")
    return LoadedModel(decoder, spec, backend(spec), precision.describe(checkpoint), notes)
