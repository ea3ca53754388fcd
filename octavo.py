"""The face for scripts: `from octavo import LLM, SamplingParams`."""

import os
from typing import TYPE_CHECKING, Any

from configs.sampling import SamplingParams
from engine.machine import core_variables, usable_cores

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`LLM` brings torch, so it is imported when it is asked for."""
    if name == "LLM":
        os.environ.update({**core_variables(usable_cores()), **os.environ})
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
