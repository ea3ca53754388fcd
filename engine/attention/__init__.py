"""Attention backends by name. A backend's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from configs.errors import SettingsError

if TYPE_CHECKING:
    from .metadata import AttentionBackend, AttentionSpec

# Name -> module and class, fastest first.
BACKENDS = {
    "cpu": ("engine.attention.cpu", "CPUAttention"),
    "torch_reference": ("engine.attention.torch_reference", "TorchReferenceAttention"),
}


def select_backend(name: str, spec: AttentionSpec) -> tuple[type[AttentionBackend], list[str]]:
    """The backend `name`, or for `auto` the first that serves `spec`, and a note on each that was passed over.

    Raises SettingsError when the name is unknown or the backend cannot serve `spec`, with its reasons.
    """
    if name != "auto" and name not in BACKENDS:
        raise SettingsError(f"attention_backend {name}: unknown; there are auto, {', '.join(BACKENDS)}")
    notes: list[str] = []
    for candidate in BACKENDS if name == "auto" else (name,):
        backend, reasons = _load(candidate, spec)
        if backend is not None and not reasons:
            return backend, notes
        notes.append(f"attention backend {candidate} cannot be used: {'; '.join(reasons)}")
    raise SettingsError("; ".join(notes))


def _load(name: str, spec: AttentionSpec) -> tuple[type[AttentionBackend] | None, list[str]]:
    module, class_name = BACKENDS[name]
    try:
        backend: type[AttentionBackend] = getattr(import_module(module), class_name)
    except ImportError as error:
        return None, [str(error)]
    return backend, backend.unsupported(spec)
