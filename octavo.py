"""The face for scripts: `from octavo import LLM, SamplingParams`."""

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from configs.sampling import SamplingParams
from engine.machine import core_variables, usable_cores

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch, so it is imported when it is asked for."""
    if name == "LLM":
        if "torch" in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
            warnings.warn(
                "torch was imported before LLM, so its threads spin where they should sleep: while other processes use "
                "the cores, steps take up to 20 times as long. Import LLM from octavo first, or start Python with "
                "GOMP_SPINCOUNT=1000 in its environment",
                RuntimeWarning,
                stacklevel=2,
            )
        variables = {key: value for key, value in core_variables(usable_cores()).items() if key not in os.environ}
        os.environ.update(variables)
        try:
            import torch

            torch.empty(1)  # with its first tensor it has read the last of them
            from engine.llm import LLM
        finally:  # what the caller starts later is none of our business
            for key in variables:
                del os.environ[key]
        globals()[name] = LLM
        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
