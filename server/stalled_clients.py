"""Ends the connections of clients that acknowledge nothing of what they were sent (on Linux, over TCP).

The kernel's own bound for that, TCP_USER_TIMEOUT, also ends the connections of clients that read all the time, if
slowly and with a small window: its probes of the window count on although some of what waits is taken.
"""

import asyncio
import contextlib
import socket
import struct
import sys
import time
from collections.abc import Collection
from typing import Any

_CHECKS_PER_TIMEOUT = 4
_BYTES_ACKED = 120
"""Offset of tcpi_bytes_acked in the kernel's struct tcp_info."""


async def end_stalled_clients(connections: Collection[Any], timeout: float) -> None:
    """Watch the set of open `connections` until cancelled; abort those that took no byte for `timeout` seconds."""
    if sys.platform != "linux":
        return
    last_progress: dict[Any, tuple[int, float]] = {}  # bytes acknowledged, and since when no more
    while True:
        await asyncio.sleep(timeout / _CHECKS_PER_TIMEOUT)
        now = time.monotonic()
        before, last_progress = last_progress, {}
        for connection in list(connections):
            acknowledged = bytes_acknowledged(connection.transport)
            if acknowledged is None:
                continue
            num_bytes, since = before.get(connection, (acknowledged, now))
            if acknowledged == num_bytes and now - since >= timeout:
                connection.transport.abort()
            else:
                last_progress[connection] = (acknowledged, since if acknowledged == num_bytes else now)


def bytes_acknowledged(transport: Any) -> int | None:
    """The bytes of all it was sent that the client acknowledged; None where nothing waits for it."""
    with contextlib.suppress(OSError, ValueError):  # another family; closed meanwhile
        if bytes_waiting(transport):
            client = transport.get_extra_info("socket")
            info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
            return int(struct.unpack_from("Q", info, _BYTES_ACKED)[0])
    return None


def bytes_waiting(transport: Any) -> int:
    """What the client was sent and has not acknowledged; elsewhere than on Linux, what is still in this process."""
    waiting: int = transport.get_write_buffer_size()
    if sys.platform == "linux":
        import fcntl
        import termios

        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            client = transport.get_extra_info("socket")
            [in_kernel] = struct.unpack("i", fcntl.ioctl(client.fileno(), termios.TIOCOUTQ, bytes(4)))
            waiting += in_kernel
    return waiting
