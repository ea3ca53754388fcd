"""What scripts import: `from octavo import LLM, SamplingParams`. Brings no torch, which the engine's process has."""

from configs.sampling import BeamSearchParams, SamplingParams
from engine.llm import LLM

__all__ = ["LLM", "BeamSearchParams", "SamplingParams"]
