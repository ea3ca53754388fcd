"""Compiles the C++ kernels for this machine once and loads them.

A plain C interface through ctypes needs no torch headers: the build takes seconds instead of a minute and the
library works with every torch release. The result is cached per source, flags and CPU.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = [
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-std=c++17", "-fopenmp", "-fPIC", "-shared"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized"),
]


class KernelsUnavailable(Exception):
    """The message says why there are no compiled kernels."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels; raises `KernelsUnavailable`.

    torch must be imported before: the library then shares torch's OpenMP threads instead of starting its own.
    """
    assert "torch" in sys.modules, "import torch first"
    if sys.byteorder != "little" or sys.platform == "win32":
        raise KernelsUnavailable(f"the C++ kernels are not built on {platform.platform()}")
    path = _cache_folder() / f"kernels-{_fingerprint()}.so"
    if not path.exists():
        _compile(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be loaded: {error}") from error


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def _fingerprint() -> str:
    digest = hashlib.sha256(" ".join([*FLAGS, platform.machine(), _cpu_flags()]).encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(path: Path) -> None:
    """Write the library to `path` by one rename, so that processes that start together do no harm."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler; install g++ for the fast CPU kernels")
    print("octavo: compiling the CPU kernels for this machine (once, some seconds)", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    done = subprocess.run([compiler, *FLAGS, *sources, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise KernelsUnavailable(f"{compiler} failed: {(done.stderr.strip() or 'no message').splitlines()[0]}")
    unfinished.rename(path)
