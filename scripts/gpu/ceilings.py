"""What the machine can do at most, by torch's own operations: bytes copied, and products of matrices."""

import torch

from .bench import Bench
from .timing import eager, seconds

DURATION = 1.5
"""Seconds: a chip that gets warm slows down, and models run for longer than that."""


def run(bench: Bench) -> None:
    size, edge = (2**20, 128) if bench.plan.is_dry else (2**31, 8192)
    bench.measure("bandwidth", rate=_bandwidth(size, bench.plan.device), unit="bytes/s", how=f"copy of {size} bytes")
    torch.cuda.empty_cache()
    how = f"bfloat16 product of {edge} x {edge} matrices"
    bench.measure("matrix_rate", rate=_matrix_rate(edge, bench.plan.device), unit="operations/s", how=how)


def _bandwidth(size: int, device: str) -> float:
    """A copied byte is read and written."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(eager([lambda: target.copy_(source)]), DURATION)


def _matrix_rate(edge: int, device: str) -> float:
    """Random factors: zeros would let the chip run faster than any model does."""
    a, b = (torch.randn(edge, edge, device=device).bfloat16() for _ in range(2))
    return 2 * edge**3 / seconds(eager([lambda: a @ b]), DURATION)
