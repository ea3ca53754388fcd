"""From a token's spelling in the vocabulary to the bytes that it stands for.

Two spellings serve every family. Byte-level BPE (GPT-2) writes each byte as one printable character.
SentencePiece writes a space as ▁ and bytes that have no token of their own as <0x00> … <0xFF>, and puts one
space before the text, which decoding takes away again.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import Decoder

from configs.errors import CheckpointError

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes, in order, for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
BYTE_CHARACTERS = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
"""The character that byte-level BPE writes for a byte."""


@dataclass(frozen=True)
class TokenSpelling:
    """How a vocabulary writes bytes."""

    byte_level: bool
    leading_spaces: int = 0
    """Spaces that decoding drops at the start of a text."""

    def to_bytes(self, token: str) -> bytes:
        """Raw bytes; a token may begin or end inside a character."""
        if self.byte_level:
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            # Added tokens stand in the vocabulary as plain text.
            return token.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def spelling_of(decoder: Decoder | None) -> TokenSpelling:
    """The spelling that a `tokenizers` decoder undoes; CheckpointError for a decoder of another kind."""
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    parts: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return TokenSpelling(byte_level=True)
    if kinds == ["Metaspace"] and parts[0]["replacement"] == SPACE_MARK:
        return TokenSpelling(byte_level=False, leading_spaces=int(parts[0]["prepend_scheme"] != "never"))
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        strip: dict[str, Any] = parts[3] if len(parts) == 4 else {"content": " ", "start": 0, "stop": 0}
        replaced = (parts[0]["pattern"], parts[0]["content"])
        if replaced == ({"String": SPACE_MARK}, " ") and (strip["content"], strip["stop"]) == (" ", 0):
            return TokenSpelling(byte_level=False, leading_spaces=strip["start"])
    raise CheckpointError(
        "the tokenizer's decoder is neither byte-level nor SentencePiece with byte fallback: "
        f"{json.dumps(state, ensure_ascii=False)[:300] if state else 'there is none'}"
    )
