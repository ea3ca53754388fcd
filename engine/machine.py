"""What the machine lets this process use: cores and memory. Imports no torch, so it can be asked before torch is."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_CGROUP, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(cgroup: Path = _CGROUP, own: Path = _OWN_CGROUP) -> int:
    """Cores that this process may keep busy: its affinity mask, cut to the CPU quotas of its cgroups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups("cpu", cgroup, own):
        quota, period = (_read(folder / "cpu.max") or "max 1").split()
        if quota == "max":
            quota = _read(folder / "cpu.cfs_quota_us") or "-1"
            period = _read(folder / "cpu.cfs_period_us") or "100000"
        if int(quota) > 0:
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def core_variables(num_threads: int) -> dict[str, str]:
    """Environment of the process that computes; libraries read it once, when they are loaded.

    At a barrier a thread spins for some microseconds and then sleeps. By default libgomp spins for milliseconds, and
    while anything else runs on the same cores, a step with hundreds of barriers takes 50 times as long. Large pages
    for torch's tensors save a few percent of a decode, which streams all weights.
    """
    sizes = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(num_threads))
    return {"GOMP_SPINCOUNT": "1000", "THP_MEM_ALLOC_ENABLE": "1", **sizes}


def module_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment of another process of ours, run with -m and -P, that finds its modules wherever it is started."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **variables, "PYTHONPATH": path}


def free_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo"), own: Path = _OWN_CGROUP) -> int:
    """Bytes that can be allocated: what the kernel calls available, cut to what the limits of the cgroups leave.

    Cached files count as free in both.
    """
    available = _table(meminfo).get("MemAvailable:", 2**23) * 1024
    for folder in _cgroups("memory", cgroup, own):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit and usage and limit != "max":
                cached = _table(folder / "memory.stat").get("inactive_file", 0)
                available = min(available, max(0, int(limit) - int(usage) + cached))
    return available


def _cgroups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """The cgroups that this process is in, from the outermost to its own: of version 2, then of version 1.

    In a container the outermost is the container's.
    """
    inner = {"": Path(), controller: Path()}
    for line in (_read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        inner |= {name: Path(path.lstrip("/")) for name in controllers.split(",") if name in inner}
    for name, own_path in inner.items():
        yield from (root / name / outer for outer in (*reversed(own_path.parents), own_path))


def has_native_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; otherwise it is slower than float32."""
    flags = (_read(Path("/proc/cpuinfo")) or "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in (_read(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows}
