"""Compiles the C++ kernels for this machine once and loads them.

A plain C interface through ctypes needs no torch headers: the build takes seconds instead of a minute and the
library works with every torch release. The result is cached per source, flags and CPU.
"""

import ctypes
import errno
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
FLAGS = [
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-std=c++17", "-fopenmp", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized"),
]


_ROOM = 16 * 2**20
"""Bytes that a compilation may take on the disk; the library has less than 2 MB."""


class KernelsUnavailable(Exception):
    """The message says why there are no compiled kernels."""


@functools.cache
def load_library(*extra_flags: str) -> ctypes.CDLL:
    """The compiled kernels; raises `KernelsUnavailable`. Extra flags are for tests of what other CPUs get.

    torch must be imported before: the library then shares torch's OpenMP threads instead of starting its own.
    """
    assert "torch" in sys.modules, "import torch first"
    if sys.byteorder != "little" or sys.platform == "win32":
        raise KernelsUnavailable(f"the C++ kernels are not built on {platform.platform()}")
    name = f"kernels-{_fingerprint(extra_flags)}.so"
    try:
        return _loaded(_cache_folder() / name, *extra_flags)
    except OSError as error:
        reason = f"{_cache_folder()}: {error.strerror}"
    print(f"octavo: the CPU kernels cannot be kept in {reason}", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
            return _loaded(Path(folder, name), *extra_flags)
    except OSError as error:
        raise KernelsUnavailable(f"no place for the compiled kernels: {reason}; elsewhere: {error.strerror}") from error


def _loaded(path: Path, *extra_flags: str) -> ctypes.CDLL:
    """Compiled to `path` unless they are there. Raises OSError where nothing can be written."""
    if not path.exists():
        _compile(path, *extra_flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be loaded: {error}") from error


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def _fingerprint(extra_flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join([*FLAGS, *extra_flags, platform.machine(), _cpu_flags()]).encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(path: Path, *extra_flags: str) -> None:
    """Write the library to `path` by one rename, so that processes that start together do no harm."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler; install g++ for the fast CPU kernels")
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    print("octavo: compiling the CPU kernels for this machine (once, some seconds)", file=sys.stderr, flush=True)
    command = [compiler, *FLAGS, *extra_flags]
    sources = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        _run(*([*command, "-c", str(source), "-o", to] for source, to in zip(sources, objects, strict=True)))
        unfinished = Path(folder, path.name)
        _run([*command, "-shared", *objects, "-o", str(unfinished)])
        unfinished.rename(path)


def _run(*commands: list[str]) -> None:
    """All at once; returns or raises when all have ended."""
    environment = {**os.environ, "LC_ALL": "C"}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
    messages = [process.communicate()[1] for process in running]
    for process, message in zip(running, messages, strict=True):
        if os.strerror(errno.ENOSPC) in message:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if process.returncode:
            raise KernelsUnavailable(f"{commands[0][0]} failed: {(message.strip() or 'no message').splitlines()[0]}")
