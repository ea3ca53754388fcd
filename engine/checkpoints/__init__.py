"""Checkpoints on disk: Hugging Face folders and GGUF files behind one type. Imports no torch."""

from pathlib import Path

from configs.errors import CheckpointError

from .checkpoint import Checkpoint, StoredTensor, TokenizerFiles
from .gguf_file import open_gguf
from .gguf_vocabulary import GGUFVocabulary
from .hf_folder import PICKLE_REASON, PICKLE_SUFFIXES, open_hf_folder

__all__ = ["Checkpoint", "GGUFVocabulary", "StoredTensor", "TokenizerFiles", "open_checkpoint"]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder or a GGUF file.

    Raises CheckpointError for anything else, and for a checkpoint with missing, cut or unsupported parts.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return open_hf_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return open_gguf(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; a model is a local folder or a .gguf file")
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(f"{path}: {PICKLE_REASON}")
    raise CheckpointError(f"{path}: neither a Hugging Face folder nor a .gguf file")
