"""Compiles the GPU kernels for GPUs that are not there, and reads what became of them.

    python -m tests.engine.ahead_of_time MODULE CAPABILITY [--all]        e.g. attention 9.0

prints a JSON list of `Compiled`. It is a process of its own, since kernels are bound to the interpreter or to the
compiler when they are defined; run it by hand, with --table, for the figures of a configuration.

Kernels are not described to it: the project's own launch code runs, with tensors that have no memory
(device="meta"), under a driver that compiles and does not launch. What is compiled is thus what would be launched: the
types, the specialised integers, the warps and stages. For this, a file tests/engine/launches_MODULE.py has

    def launches(capability: tuple[int, int]) -> Iterator[Launch]

with a `Launch` for each shipped configuration, pairwise over types and shapes where there are many. A kernel compiles
in 0.3 to 2 s: what only repeats what others show is marked `slow`, and is left out without --all.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self
from unittest import mock

INSTRUCTIONS = {
    "HMMA": r"\bHMMA\.",  # matrix products of sm_80
    "IMMA": r"\bIMMA\.",
    "HGMMA": r"\bHGMMA\.",  # of sm_90
    "UTCMMA": r"\bUTC\w*MMA\b",  # of sm_100
    "LDGSTS.128": r"\bLDGSTS\.[\w.]*128\b",  # asynchronous copies to shared memory
    "LDG.128": r"\bLDG\.[\w.]*128\b",
    "spills": r"\b(?:LDL|STL)\b",
}

SHARED_MEMORY = {80: 163, 90: 227, 100: 227}
"""KiB that a thread block can have; GPUs for workstations have 99."""


@dataclass(frozen=True)
class Launch:
    name: str
    run: Callable[[], object]
    """Launches one kernel or several, by the project's own code."""
    expected: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Kernels that must be launched, and the names in INSTRUCTIONS of which each must have at least one."""
    max_stack: int = 0
    """Bytes per thread; more than 0 only where the spills were looked at and do not matter."""
    slow: bool = False
    variants: int | None = None
    """Of a kernel, at most so many are compiled in `run`. Where `run` is steps of several sizes, 1 tells that no step
    waits for a compiler, and that no capture fails for it."""


@dataclass(frozen=True)
class Compiled:
    launch: str
    kernel: str
    registers: int
    stack: int
    shared: int  # bytes
    warps: int
    stages: int
    instructions: Mapping[str, int]
    faults: list[str]

    @classmethod
    def read(cls, launch: Launch, name: str, compiled: Any) -> Self:
        """From what Triton compiled."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled.asm["cubin"])
            usage, code = (_cuobjdump(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found is not None, usage
        registers, stack = map(int, found.groups())
        metadata = compiled.metadata
        counts = {instruction: len(re.findall(pattern, code)) for instruction, pattern in INSTRUCTIONS.items()}
        faults = [f"no {wanted}" for wanted in launch.expected.get(name, ()) if not counts[wanted]]
        if stack > launch.max_stack:
            faults.append(f"a stack of {stack} bytes: registers are spilled")
        if metadata.shared > (most := 1024 * SHARED_MEMORY.get(metadata.target.arch, 99)):
            faults.append(f"{metadata.shared} bytes of shared memory of {most}")
        shape = (metadata.shared, metadata.num_warps, metadata.num_stages)
        return cls(launch.name, name, registers, stack, *shape, counts, faults)


def compile_all(module: str, capability: tuple[int, int], every: bool = False) -> Iterator[Compiled]:
    """In this process, which must not have loaded Triton with TRITON_INTERPRET."""
    seen: set[str] = set()
    with _recording(capability) as kernels:
        for launch in import_module(f"tests.engine.launches_{module}").launches(capability):
            if launch.slow and not every:
                continue
            kernels.clear()
            launch.run()
            missing = set(launch.expected) - {name for name, _ in kernels}
            assert not missing, f"{launch.name}: {missing} not launched"
            variants = Counter(name for name, _ in {(name, compiled.hash) for name, compiled in kernels})
            assert not launch.variants or max(variants.values()) <= launch.variants, f"{launch.name}: {variants}"
            for name, compiled in kernels:
                if compiled.hash not in seen:
                    seen.add(compiled.hash)
                    yield Compiled.read(launch, name, compiled)


def compiled_elsewhere(module: str, capability: tuple[int, int], every: bool = False) -> list[dict[str, Any]]:
    """`compile_all` by a process of its own: each `Compiled` as a dictionary."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.ahead_of_time", module, ".".join(map(str, capability))]
    ran = subprocess.run(command + ["--all"] * every, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    result: list[dict[str, Any]] = json.loads(ran.stdout)
    return result


@contextmanager
def _recording(capability: tuple[int, int]) -> Iterator[list[tuple[str, Any]]]:
    """Launches compile only; the list receives the name of each and what Triton made of it."""
    import triton
    from triton.backends.compiler import GPUTarget

    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is set"
    kernels: list[tuple[str, Any]] = []
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        kernels.append((kernel.fn.__name__, run(kernel, *args, **options | {"warmup": True})))

    driver = mock.Mock()
    driver.get_current_device.return_value = 0
    driver.get_current_target.return_value = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    triton.runtime.driver.set_active(driver)
    with mock.patch.object(triton.JITFunction, "run", compile_only):
        yield kernels


def _cuobjdump(option: str, path: str) -> str:
    from triton import knobs

    program = knobs.nvidia.cuobjdump.path
    return subprocess.run([program, option, path], capture_output=True, text=True, check=True).stdout


def _table(rows: Iterator[Compiled]) -> None:
    for row in rows:
        counts = " ".join(f"{name} {count}" for name, count in row.instructions.items() if count)
        print(
            f"{row.launch:50} {row.kernel:20} {row.registers:3} registers {row.stack:4} stack {row.shared:6} shared "
            f"{row.warps} warps {row.stages} stages  {counts} {row.faults or ''}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("capability", type=lambda text: tuple(map(int, text.split("."))))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    rows = compile_all(options.module, options.capability, options.all)
    if options.table:
        _table(rows)
    else:
        print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
