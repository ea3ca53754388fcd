"""Arithmetic of embeddings, and the answers that hold them; both run off the event loop."""

import asyncio
import base64
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from configs.errors import InvalidRequest

Vectors = npt.NDArray[np.float64]
"""One embedding per row."""


def normalized(vectors: Vectors) -> Vectors:
    """Scaled to (Euclidean) length 1; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)


def cosines(vectors: list[list[float]], num_first: int) -> list[float]:
    """Of the first vectors with the others, pair by pair; a single first one belongs to all pairs."""
    unit = normalized(np.stack([np.array(vector) for vector in vectors]))  # each call holds the interpreter's lock
    found: list[float] = (unit[:num_first] * unit[num_first:]).sum(axis=1).tolist()
    return found


def shaped(
    vectors: list[list[float]], dimensions: int | None, *, normalize: bool, as_base64: bool
) -> Iterator[list[float] | str]:
    """Embeddings of so many dimensions, as numbers or as base64 of little-endian float32.

    Raises `InvalidRequest` for more dimensions than the model has, before the first.
    """
    size = len(vectors[0])
    if dimensions is not None and dimensions > size:
        message = f"dimensions must be between 1 and {size}, the model's hidden size; got {dimensions}"
        raise InvalidRequest(message, param="dimensions")
    return (_shape(vector[:dimensions], normalize, as_base64) for vector in vectors)


def _shape(vector: list[float], normalize: bool, as_base64: bool) -> list[float] | str:
    row = np.array([vector])
    row = normalized(row) if normalize else row
    if as_base64:
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    shape: list[float] = row[0].tolist()
    return shape


async def filled(head: Mapping[str, object], field: str, items: Iterable[object]) -> bytes:
    """The JSON of `head` with one more field: a list that is made item by item, each of which holds the
    interpreter's lock."""

    def encoded() -> bytes:
        joined = b",".join([msgspec.json.encode(item) for item in items])
        return msgspec.json.encode(head)[:-1] + b"," + msgspec.json.encode(field) + b":[" + joined + b"]}"

    return await asyncio.to_thread(encoded)
