"""Safetensors files, by the library of that name: headers at once, tensors memory-mapped where they are used."""

import math
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from configs.errors import CheckpointError

from .checkpoint import StoredTensor

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


def read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name. Raises CheckpointError when the file is missing, malformed or cut."""
    if not file.is_file():  # a pipe, say, would keep the library waiting
        raise CheckpointError(f"{file}: cannot be read (no such file)")
    try:
        with safe_open(file, framework="np") as opened:
            headers = {name: opened.get_slice(name) for name in opened.offset_keys()}
            shapes = {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors ({error})") from None
    mapped = _Mapped(file)
    return {name: _tensor(mapped, name, *found) for name, found in shapes.items()}


def _tensor(mapped: "_Mapped", name: str, shape: tuple[int, ...], dtype: str) -> StoredTensor:
    num_bytes = math.prod(shape) * ELEMENT_BYTES.get(dtype, 0)
    read = partial(mapped.tensor, name) if dtype in ELEMENT_BYTES else None
    return StoredTensor(name, mapped.file, name, shape, dtype, num_bytes, read)


class _Mapped:
    """Opened when the first tensor is read, by who computes: with torch, since numpy knows no bfloat16."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @cached_property
    def _opened(self) -> Any:
        return safe_open(self.file, framework="pt")

    def tensor(self, name: str) -> Any:
        return self._opened.get_tensor(name)
