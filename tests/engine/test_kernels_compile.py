"""Every shipped configuration of the GPU kernels, compiled for GPUs that are not there; see ahead_of_time.py."""

from pathlib import Path

import pytest

from tests.engine.ahead_of_time import compiled_elsewhere

pytest.importorskip("triton")

MODULES = sorted(path.stem.removeprefix("launches_") for path in Path(__file__).parent.glob("launches_*.py"))


def check(module: str, capability: tuple[int, int], every: bool) -> None:
    rows = compiled_elsewhere(module, capability, every)
    assert rows
    assert not [(row["launch"], row["kernel"], row["faults"]) for row in rows if row["faults"]]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=lambda version: f"sm_{version[0]}{version[1]}")
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_without_spills_and_with_matrix_instructions(module: str, capability: tuple[int, int]) -> None:
    check(module, capability, every=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=lambda version: f"sm_{version[0]}{version[1]}")
@pytest.mark.parametrize("module", MODULES)
def test_every_configuration_compiles(module: str, capability: tuple[int, int]) -> None:
    check(module, capability, every=True)
