"""Headers of safetensors files; the tensors stay memory-mapped."""

import math
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from configs.errors import CheckpointError

from .checkpoint import StoredTensor

# file:  | u64 n | n bytes of JSON | data ......................... |
#                                   ^ data_offsets count from here
LENGTH_BYTES = 8

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors(file: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name.

    Raises CheckpointError when the file is missing, malformed or cut, or holds a type that is not a float.
    """
    try:
        mapped = np.memmap(file, dtype=np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None
    header_end = LENGTH_BYTES + int.from_bytes(mapped[:LENGTH_BYTES].tobytes(), "little")
    if len(mapped) < header_end:
        raise CheckpointError(f"{file}: cut: its header needs {header_end} bytes, the file has {len(mapped)}")
    try:
        header = msgspec.json.decode(mapped[LENGTH_BYTES:header_end].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from None
    data = mapped[header_end:]
    return {name: _tensor(file, name, entry, data) for name, entry in entries.items()}


def _tensor(file: Path, name: str, entry: _Entry, data: npt.NDArray[np.uint8]) -> StoredTensor:
    begin, end = entry.data_offsets
    if entry.dtype not in ELEMENT_BYTES:
        raise CheckpointError(
            f"{file}: tensor {name} has type {entry.dtype}; only {', '.join(ELEMENT_BYTES)} are served"
        )
    if end > len(data):
        raise CheckpointError(f"{file}: cut: tensor {name} ends at byte {end} of the data, the file has {len(data)}")
    if begin < 0 or end - begin != math.prod(entry.shape) * ELEMENT_BYTES[entry.dtype]:
        raise CheckpointError(f"{file}: tensor {name} of shape {entry.shape} cannot lie in {end - begin} bytes")
    return StoredTensor(name, file, name, tuple(entry.shape), entry.dtype, data[begin:end])
