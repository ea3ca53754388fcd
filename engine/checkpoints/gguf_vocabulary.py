"""The tokenizer's part of GGUF's metadata."""

from dataclasses import dataclass
from typing import Any

from configs.errors import CheckpointError

from .values import Values, named

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`."""

TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>"}
    | {"<|end_of_turn|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "<|return|>", "<|call|>", "[EOS]", "[EOT]", "</s>"}
)
"""Spellings of tokens that end a turn or a text, whatever else is declared to; llama.cpp goes by them, too."""

_NEVER_WORDS = ("<|", "<end_of_")
"""What begins so was never learned as an ordinary word, though a converter may call it one."""


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokenizer of a GGUF file. List positions are token ids."""

    model: str
    """gpt2 (byte-level BPE) or llama (SentencePiece)."""
    pre: str
    """Which regular expression splits text before BPE."""
    tokens: list[str]
    scores: list[float]
    token_types: list[int]
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    merges: list[str]
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    add_bos_token: bool | None
    """None: the file does not say."""
    add_eos_token: bool | None
    add_space_prefix: bool | None


def read_vocabulary(file: Values) -> tuple[GGUFVocabulary, tuple[int, ...]]:
    """The vocabulary, and the ids that end a sequence: those that the file names, and those that are spelled so."""
    tokens: list[str] = _list(file, "tokens", str)
    token_types: list[int] = _list(file, "token_type", int) or [NORMAL] * len(tokens)
    ends = [_token_id(file, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [token_id for token_id in _list(file, "eos_token_ids", int) if 0 <= token_id < len(tokens)]
    if len(token_types) == len(tokens):
        spelled = [
            token_id
            for token_id, token in enumerate(tokens)
            if token in TURN_ENDS and (token_types[token_id] != NORMAL or token.startswith(_NEVER_WORDS))
        ]
        for token_id in spelled:  # in text they are this token, however the converter has declared them
            token_types[token_id] = CONTROL
        ends += spelled
    vocabulary = GGUFVocabulary(
        model=named(file.get("ggml.model", "")),
        pre=named(file.get("ggml.pre", "default")),
        tokens=tokens,
        scores=_list(file, "scores", float),
        token_types=token_types,
        merges=_list(file, "merges", str),
        bos_token_id=_token_id(file, "bos_token_id"),
        eos_token_id=_token_id(file, "eos_token_id"),
        unk_token_id=_token_id(file, "unknown_token_id"),
        pad_token_id=_token_id(file, "padding_token_id"),
        add_bos_token=_flag(file, "add_bos_token"),
        add_eos_token=_flag(file, "add_eos_token"),
        add_space_prefix=_flag(file, "add_space_prefix"),
    )
    return vocabulary, tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))


def _list(file: Values, name: str, kind: type) -> list[Any]:
    """Elements of an array are all of one type."""
    key = f"ggml.{name}"
    values = file.get(key, [])
    if not isinstance(values, list) or (values and not isinstance(values[0], kind)):
        raise CheckpointError(f"{file.file}: tokenizer.{key} is no list of type {kind.__name__}")
    return values


def _token_id(file: Values, name: str) -> int | None:
    key = f"ggml.{name}"
    return file.whole(key, least=0, most=2**32 - 1) if key in file else None


def _flag(file: Values, name: str) -> bool | None:
    key = f"ggml.{name}"
    return file.flag(key) if key in file else None
