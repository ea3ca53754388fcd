"""The records of all families, one file for each kind; see `Family`."""

import importlib
import pkgutil

from engine.checkpoints.family import Family

FAMILIES: tuple[Family, ...] = tuple(
    family
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__))
    for family in importlib.import_module(f"{__name__}.{module}").FAMILIES
)

BY_NAME = {family.name: family for family in FAMILIES}

BY_GGUF = {name: family for family in FAMILIES for name in family.gguf}


def family_of(architecture: str) -> Family:
    """`architecture` is the one of a ModelConfig, as LlamaForCausalLM."""
    return BY_NAME[architecture.removesuffix("ForCausalLM")]
