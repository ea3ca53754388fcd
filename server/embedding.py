"""Arithmetic of embeddings, on the lists that the engine gives."""

import base64
import math
import operator
import struct
from collections.abc import Sequence


def normalized(vector: Sequence[float]) -> list[float]:
    """Scaled to (Euclidean) length 1; zeros stay."""
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the angle between two vectors of length 1."""
    return math.fsum(map(operator.mul, one, other))


def as_base64(vector: Sequence[float]) -> str:
    """Of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
