"""What the machine can do at most, measured with the kernels' own instructions: bytes read, and products."""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.cpu.build import load_library

READ_BYTES = 2**28
"""Far more than a cache holds."""
LANES = 16
PRODUCTS_PER_LANE = {"float32": 1, "bfloat16": 2, "int8": 4}
SECONDS = 0.05
TRIES = 10


@dataclass(frozen=True)
class Ceilings:
    """Per second, all threads together."""

    bytes_read: float
    operations: dict[str, float]
    """By type of the factors; a product and its sum are two operations."""

    def seconds(self, num_bytes: float, num_operations: float, kind: str) -> tuple[float, str]:
        """The least time that so much work takes, and which limit sets it."""
        reading, computing = num_bytes / self.bytes_read, num_operations / self.operations[kind]
        return (reading, "memory") if reading > computing else (computing, f"{kind} products")


def measure_ceilings(num_threads: int) -> Ceilings:
    """The best of several tries each. Raises `KernelsUnavailable` without a compiler."""
    library = load_library()
    data = torch.ones(READ_BYTES, dtype=torch.uint8)
    library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
    reading = _best(lambda: library.read_memory(data.data_ptr(), READ_BYTES, num_threads))
    operations = {}
    for kind, products in PRODUCTS_PER_LANE.items():
        multiply = getattr(library, f"multiply_{kind}")
        multiply.argtypes, multiply.restype = [ctypes.c_long, ctypes.c_int], ctypes.c_float
        per_repetition = 2 * products * LANES * library.products_per_repetition() * num_threads
        operations[kind] = per_repetition * _rate(multiply, num_threads)
    return Ceilings(READ_BYTES / reading, operations)


def _rate(multiply: Callable[[int, int], float], num_threads: int) -> float:
    """Repetitions per second."""

    def seconds(repetitions: int, tries: int = TRIES) -> float:
        return _best(lambda: multiply(repetitions, num_threads), tries)

    repetitions = 1000
    while seconds(repetitions, tries=1) < SECONDS / 4:
        repetitions *= 4
    return repetitions / seconds(repetitions)


def _best(work: Callable[[], object], tries: int = TRIES) -> float:
    """Seconds of the fastest try."""
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
