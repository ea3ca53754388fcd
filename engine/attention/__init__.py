"""Attention backends by name. A backend's module is imported when it is asked for."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from configs.errors import SettingsError

if TYPE_CHECKING:
    from .metadata import AttentionBackend, AttentionSpec

logger = logging.getLogger("octavo.engine")

BACKENDS = {
    "cpu": ("engine.attention.cpu", "CPUAttention"),
    "fa3": ("engine.attention.fa3", "FA3Attention"),
    "triton": ("engine.attention.triton_paged", "TritonAttention"),
    "xformers": ("engine.attention.xformers_paged", "XFormersAttention"),
    "flex": ("engine.attention.flex", "FlexAttention"),
    "torch_reference": ("engine.attention.torch_reference", "TorchReferenceAttention"),
}
"""Name -> module and class."""
AUTO = {"cuda": ("fa3", "triton", "xformers", "torch_reference"), "cpu": ("cpu", "torch_reference")}
"""Type of the device -> what `auto` tries, fastest first."""


def select_backend(name: str, spec: AttentionSpec) -> tuple[type[AttentionBackend], list[str]]:
    """The backend `name`, or for `auto` the first that serves `spec`, and a note on each that was passed over.

    Raises SettingsError when the name is unknown or the backend cannot serve `spec`, with its reasons.
    """
    if name != "auto" and name not in BACKENDS:
        raise SettingsError(f"attention_backend {name}: unknown; there are auto, {', '.join(BACKENDS)}")
    notes: list[str] = []
    for candidate in AUTO.get(spec.device.type, ("torch_reference",)) if name == "auto" else (name,):
        backend, reasons = _load(candidate, spec)
        if backend is not None and not reasons:
            return backend, notes
        notes.append(f"attention backend {candidate} cannot be used: {'; '.join(reasons)}")
    raise SettingsError("; ".join(notes))


def needs_check(spec: AttentionSpec) -> bool:
    """Whether a backend has to show first that it computes the right thing: where no test ever ran."""
    return spec.device.type == "cuda"


def _load(name: str, spec: AttentionSpec) -> tuple[type[AttentionBackend] | None, list[str]]:
    module, class_name = BACKENDS[name]
    try:
        backend: type[AttentionBackend] = getattr(import_module(module), class_name)
    except ImportError as error:
        return None, [str(error)]
    reasons = backend.unsupported(spec)
    if not reasons and needs_check(spec):
        reasons = _failures(backend, spec)
    return backend, reasons


def _failures(backend: type[AttentionBackend], spec: AttentionSpec) -> list[str]:
    from .self_check import self_check

    failure = self_check(backend, spec)
    if failure is None:
        return []
    logger.error("attention backend %s fails its check on this machine: %s", backend.name, failure)
    return [f"it fails its check on this machine: {failure}"]
