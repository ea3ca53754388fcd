"""Where tensors get their numbers from the host: in place on a CPU, through pinned memory on a GPU."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

PIECE_BYTES = 16 * 2**20
"""Long enough that starting a copy costs nothing beside it, and little pinned memory: two pieces for each thread."""

_ALIGNMENT = 16

Target = tuple[Tensor, torch.dtype]
"""A tensor to fill, and the type in which its rows come from the host."""


class Placement(Protocol):
    device: torch.device

    def pieces(self, *targets: Target) -> Iterator[tuple[slice, list[Tensor]]]:
        """Rows, and for each target a host tensor [rows, ...] to write them to before the next piece is asked for.

        The targets have equally many rows. A host tensor is of the given type, or of the target's own.
        """
        ...


class InPlace:
    """On a CPU: one piece, the tensors themselves."""

    device = torch.device("cpu")

    def pieces(self, *targets: Target) -> Iterator[tuple[slice, list[Tensor]]]:
        yield slice(0, len(targets[0][0])), [out for out, _ in targets]


class Link(Protocol):
    """The way to a device; copies run in the order in which they were asked for."""

    device: torch.device

    def pin(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] on the host, from which copies can run on their own."""
        ...

    def copy(self, out: Tensor, host: Tensor) -> None:
        """Ask for a copy, with the conversion to the type of `out` on the device."""
        ...

    def mark(self) -> Callable[[], object]:
        """A function that waits for all copies that were asked for before."""
        ...


class CUDALink:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, out: Tensor, host: Tensor) -> None:
        out.copy_(host.to(self.device, non_blocking=True))

    def mark(self) -> Callable[[], object]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


class Staging:
    """Two buffers for each thread: one is filled from the file while the other is on its way to the device."""

    def __init__(self, link: Link, piece_bytes: int = PIECE_BYTES) -> None:
        self.device = link.device
        self._link, self._piece_bytes = link, piece_bytes
        self._of_thread = threading.local()

    def pieces(self, *targets: Target) -> Iterator[tuple[slice, list[Tensor]]]:
        num_rows = len(targets[0][0])
        widths = [out[0].numel() * dtype.itemsize for out, dtype in targets]
        step = max(1, self._piece_bytes // sum(widths))
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            sizes = [width * (rows.stop - start) for width in widths]
            buffer = self._free_buffer(sum(map(_aligned, sizes)))
            hosts, begin = [], 0
            for (out, dtype), size in zip(targets, sizes, strict=True):
                hosts.append(buffer.memory[begin : begin + size].view(dtype).view(out[rows].shape))
                begin += _aligned(size)
            yield rows, hosts
            for (out, _), host in zip(targets, hosts, strict=True):
                self._link.copy(out[rows], host)
            buffer.wait = self._link.mark()

    def _free_buffer(self, num_bytes: int) -> "_Buffer":
        """This thread's buffer of longest standing, once its copy is done."""
        if not hasattr(self._of_thread, "buffers"):
            self._of_thread.buffers = deque(_Buffer() for _ in range(2))
        buffers: deque[_Buffer] = self._of_thread.buffers
        buffers.rotate()
        buffers[0].wait()
        if len(buffers[0].memory) < num_bytes:
            buffers[0].memory = self._link.pin(max(num_bytes, self._piece_bytes))
        return buffers[0]


class _Buffer:
    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.wait: Callable[[], object] = lambda: None


IN_PLACE = InPlace()


def select_placement(device: torch.device) -> Placement:
    return Staging(CUDALink(device)) if device.type == "cuda" else IN_PLACE


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
