"""What every kind of checkpoint offers: the network's shape, its stored tensors and its text side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from engine.models.config import ModelConfig

if TYPE_CHECKING:
    from .gguf_vocabulary import GGUFVocabulary


@dataclass(frozen=True)
class Scale:
    """What the numbers of another tensor have to be multiplied by."""

    tensor: StoredTensor  # of two dimensions
    block: tuple[int, int]
    """Rows and columns that share an element; the last block of either may be cut."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in its file; nothing is read until `read` is called."""

    name: str
    """Hugging Face's name, for GGUF files as well."""
    file: Path
    stored_name: str
    """The name inside `file`."""
    shape: tuple[int, ...]
    """Rows first, in elements."""
    dtype: str
    """F64, F32, F16, BF16, F8_E4M3 or one of GGUF's quantised types, such as Q4_K."""
    num_bytes: int
    read: Callable[[], Any] | None = field(repr=False)
    """The raw little-endian bytes as a flat array, or torch's tensor; mapped copy-on-write. None: the type is none of
    those."""
    row_order: npt.NDArray[np.int64] | None = field(default=None, repr=False)
    """Where the rows, which are elements in a vector, lie in the file; None: in order."""
    is_transposed: bool = False
    """Whether the file has it as [columns, rows]; floats only."""
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
    """generation_config.json without the values that cannot be used; empty when there is none."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence by the generation config, the config or GGUF's metadata; the tokenizer knows others."""
    tokenizer_source: TokenizerFiles | GGUFVocabulary
    chat_templates: dict[str, str]
    """Jinja sources by name: `default`, and perhaps `tool_use` and others."""
    tensors: dict[str, StoredTensor] = field(repr=False)
    """By Hugging Face name."""
    pooling: Literal["last", "mean"] = "last"
    """How embeddings are made where nobody says."""
    notes: tuple[str, ...] = ()
    """What the person who starts it may want to know."""

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")
