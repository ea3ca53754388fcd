"""The container format of GGUF: metadata and tensor directory, memory-mapped.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's reader makes several
array views per vocabulary entry, which takes seconds; this walk takes some fifty milliseconds.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.errors import CheckpointError

from .values import Values, shown

# file:  | "GGUF" u32 version  u64 tensors  u64 pairs | pairs | tensor directory | padding | data ........ |
#                                                                                           ^ offsets count from here
MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
MAX_DEPTH = 8
"""How deep arrays may lie in arrays; files have one."""
MAX_DIMS = 8
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Type number in the file -> name, elements per block, bytes per block.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}


@dataclass(frozen=True)
class GGUFTensor:
    shape: tuple[int, ...]
    """Rows first, in elements."""
    dtype: str
    data: npt.NDArray[np.uint8]
    """Raw bytes, flat; mapped copy-on-write."""


@dataclass(frozen=True)
class GGUFContents:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(file: Path) -> GGUFContents:
    """Raises CheckpointError when the file is malformed or cut, or holds a type that cannot be dequantised."""
    if not file.is_file():  # a pipe, say, would keep the reader waiting
        raise CheckpointError(f"{file}: cannot be read (no such file)")
    try:
        with file.open("rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None
    if mapped[:4] != MAGIC:
        raise CheckpointError(f"{file}: not a GGUF file")
    try:
        return _read(file, _Cursor(mapped))
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{file}: cut or malformed header ({error})") from None


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped = mapped
        self.offset = 4

    def scalars(self, letters: str) -> tuple[Any, ...]:
        form = struct.Struct("<" + letters)
        values = form.unpack_from(self.mapped, self.offset)
        self.offset += form.size
        return values

    def string(self) -> str:
        (length,) = self.scalars("Q")
        raw = self.mapped[self.offset : self.offset + length]
        if len(raw) < length:
            raise ValueError(f"a string of {length} bytes at byte {self.offset} passes the end")
        self.offset += length
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.scalars("IQ")
            if count > len(self.mapped) or depth > MAX_DEPTH:
                raise ValueError(f"an array of {count} at depth {depth}")
            if inner in SCALARS:
                return list(self.scalars(f"{count}{SCALARS[inner]}"))
            return [self.value(inner, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalars(SCALARS[kind])[0]


def _read(file: Path, cursor: _Cursor) -> GGUFContents:
    version, num_tensors, num_pairs = cursor.scalars("IQQ")
    if version not in (2, 3):
        raise CheckpointError(f"{file}: GGUF version {version} is not supported (2 and 3, little-endian, are)")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        (kind,) = cursor.scalars("I")
        metadata[key] = cursor.value(kind)
    directory = []
    for _ in range(num_tensors):
        name = cursor.string()
        (num_dims,) = cursor.scalars("I")
        if num_dims > MAX_DIMS:
            raise ValueError(f"tensor {shown(name)} has {num_dims} dimensions")
        dims = cursor.scalars(f"{num_dims}Q")  # innermost first
        directory.append((name, tuple(reversed(dims)), *cursor.scalars("IQ")))
    alignment = Values(file, metadata).whole("general.alignment", DEFAULT_ALIGNMENT, most=2**20)
    begin = -(-cursor.offset // alignment) * alignment
    everything = np.frombuffer(cursor.mapped, dtype=np.uint8)
    data = everything[begin:]
    tensors = {name: _tensor(file, name, shape, kind, data, offset) for name, shape, kind, offset in directory}
    return GGUFContents(metadata, tensors)


def _tensor(
    file: Path, name: str, shape: tuple[int, ...], kind: int, data: npt.NDArray[np.uint8], offset: int
) -> GGUFTensor:
    if kind not in TENSOR_TYPES:
        raise CheckpointError(f"{file}: tensor {name} has type {kind}, which cannot be dequantised")
    dtype, block_elements, block_bytes = TENSOR_TYPES[kind]
    if shape and shape[-1] % block_elements:
        raise CheckpointError(f"{file}: tensor {name}: rows of {shape[-1]} elements are not whole blocks of {dtype}")
    num_bytes = math.prod(shape) // block_elements * block_bytes
    if offset + num_bytes > len(data):
        raise CheckpointError(
            f"{file}: cut: tensor {name} ends at byte {offset + num_bytes} of the data, the file has {len(data)}"
        )
    return GGUFTensor(shape, dtype, data[offset : offset + num_bytes])
