"""Fixtures for every test."""

from pathlib import Path

import pytest

SMOLLM2 = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled checkpoint; tests that need it are skipped where it has not been fetched."""
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2} is not there; `make setup` fetches it")
    return SMOLLM2
