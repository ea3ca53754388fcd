"""From settings and a checkpoint to a network with its attention backend, before any cache is allocated."""

from dataclasses import dataclass

import torch

from configs.settings import EngineConfig

from .attention import select_backend
from .attention.metadata import AttentionBackend, AttentionSpec
from .checkpoints import Checkpoint
from .device import select_device, select_dtype
from .kernels import select_ops
from .models.decoder import Decoder
from .weights.loader import load_decoder
from .weights.precision import select_precision


@dataclass(frozen=True)
class LoadedModel:
    decoder: Decoder
    spec: AttentionSpec
    backend: AttentionBackend
    quantization: str
    """How the linear layers' weights are kept."""
    notes: list[str]
    """For the start-up message: what was passed over, and why."""


def load_model(config: EngineConfig, checkpoint: Checkpoint) -> LoadedModel:
    """Raises `UsageError` when settings, checkpoint and machine do not go together."""
    model = checkpoint.config
    device = select_device(config.device)
    dtype, dtype_notes = select_dtype(config.dtype, model.dtype, device)
    ops, ops_notes = select_ops(model, device, dtype)
    precision, precision_notes = select_precision(config.quantization, ops, dtype)
    spec = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        device=device,
        block_size=config.block_size,
        windows=tuple(model.window(layer) for layer in range(model.num_layers)),
        scale=model.head_dim**-0.5,
        kv_cache_dtype=torch.int8 if config.kv_cache_dtype == "int8" else None,
    )
    backend, backend_notes = select_backend(config.attention_backend, spec)
    decoder = load_decoder(checkpoint, ops, dtype, device, precision)
    notes = [*dtype_notes, *ops_notes, *precision_notes, *backend_notes]
    return LoadedModel(decoder, spec, backend(spec), precision.describe(checkpoint), notes)
