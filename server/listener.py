"""The listening socket, and how many connections there are file descriptors for."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from configs.errors import UsageError

RESERVE = 64
"""File descriptors for everything but clients: a restart of the engine, its files, its pipes."""
_MOST_DESCRIPTORS = 2**16


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that clients are refused until the model is loaded.

    Raises `UsageError` when the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            on_failure.pop_all()
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


@contextlib.contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """The same with a socket in the file system, for this user and group; it goes at the end."""
    try:
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(socket.AF_UNIX))
            _remove_if_unused(path)
            listener.bind(path)
            Path(path).chmod(0o660)
            on_failure.pop_all()
    except OSError as error:
        raise UsageError(f"--uds {path}: {error.strerror or error}") from error
    with listener:
        yield listener
        Path(path).unlink(missing_ok=True)


def _remove_if_unused(path: str) -> None:
    """What a server that was killed has left."""
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()


def raise_descriptor_limit() -> None:
    """To what this process may have."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """How many connections there are file descriptors for, of those that are open now and a reserve apart."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # not on Linux
        num_open = RESERVE
    return max(8, (_MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) - num_open - RESERVE)
