"""Fixtures for every test."""

import os
from pathlib import Path

import hypothesis
import pytest

# read when torch is loaded: its threads then sleep at barriers, as the engine's do, and leave the cores to others
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, and when a kernel is defined

hypothesis.settings.register_profile("without deadline", deadline=None)  # machines are slow at times
hypothesis.settings.load_profile("without deadline")

SMOLLM2 = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled checkpoint; tests that need it are skipped where it has not been fetched."""
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2} is not there; `make setup` fetches it")
    return SMOLLM2
