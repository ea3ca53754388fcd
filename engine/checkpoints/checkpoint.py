"""What every kind of checkpoint offers: the network's shape, its stored tensors and its text side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.models.config import ModelConfig

if TYPE_CHECKING:
    from .gguf_file import GGUFVocabulary


@dataclass(frozen=True)
class Scale:
    """What the numbers of another tensor have to be multiplied by."""

    tensor: StoredTensor  # of two dimensions
    block: tuple[int, int]
    """Rows and columns that share an element; the last block of either may be cut."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in its file; nothing is read until `data` is touched."""

    name: str
    """Hugging Face's name, for GGUF files as well."""
    file: Path
    stored_name: str
    """The name inside `file`."""
    shape: tuple[int, ...]
    """Rows first, in elements."""
    dtype: str
    """F64, F32, F16, BF16, F8_E4M3 or one of GGUF's quantised types, such as Q4_K."""
    data: npt.NDArray[np.uint8]
    """The raw little-endian bytes, flat; mapped copy-on-write."""
    scale: Scale | None = None
    """Of F8_E4M3, always."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a Hugging Face folder."""

    folder: Path
    tokenizer_config: dict[str, Any]
    """Parsed tokenizer_config.json; empty when there is none."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Opening reads headers and configuration, no weights."""

    path: Path
    name: str
    config: ModelConfig
    generation_config: dict[str, Any]
    """Raw generation_config.json; empty when there is none."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a sequence: those of the generation config, the config and the tokenizer together."""
    tokenizer_source: TokenizerFiles | GGUFVocabulary
    chat_template: str | None
    """Jinja source; the one named `default` when there are several."""
    tensors: dict[str, StoredTensor] = field(repr=False)
    """By Hugging Face name."""
    notes: tuple[str, ...] = ()
    """What the person who starts it may want to know."""
