"""How few tokens a text can have, told by its length alone: what cannot fit need not be encoded."""

import json
from typing import Any

import tokenizers
from tokenizers.models import BPE

from .token_spelling import BYTE_CHARACTERS

_COMPOSED = 4
"""Characters that Unicode's composition joins to one at most."""
_UTF8_BYTES = [byte for byte in range(0xF5) if byte not in (0xC0, 0xC1)]
"""The bytes that occur in UTF-8."""
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
"""Pre-tokenizers that leave every character in the text."""


class TokenBound:
    """A bound for tokenizers that leave out no characters, or known ones; others may make one token of any text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        normalizers, pre_tokenizers = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
        dropped = _dropped(backend, pre_tokenizers)
        self._dropped = dropped or ()
        is_sound = (
            backend.truncation is None
            and dropped is not None
            and all(map(_keeps_length, normalizers))
            and all(map(_keeps_characters, pre_tokenizers))
        )
        added = backend.get_added_tokens_decoder().values()
        self._greedy = [token.content for token in added if token.lstrip or token.rstrip]
        """Tokens that take any number of spaces beside them."""
        if any(token.normalized for token in added if token.lstrip or token.rstrip) and normalizers:
            is_sound = False  # they may be spelled otherwise
        normalized = [backend.normalizer.normalize_str(token.content) for token in added] if normalizers else []
        self._longest = max(map(len, (*backend.get_vocab(), *normalized))) if is_sound else None
        self._composes = any(part["type"] in ("NFC", "NFKC") for part in normalizers)

    def least_tokens(self, text: str) -> int:
        """At least so many tokens encode `text`."""
        if self._longest is None or any(token in text for token in self._greedy):
            return 0
        kept = len(text) - sum(map(text.count, self._dropped))
        per_token = self._longest * (_COMPOSED if self._composes and not text.isascii() else 1)
        return -(-kept // per_token)


def _parts(component: Any) -> list[dict[str, Any]]:
    """The state of a normalizer or pre-tokenizer, a sequence taken apart."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    nested = state.get("normalizers", state.get("pretokenizers"))
    return [state] if nested is None else nested


def _dropped(backend: tokenizers.Tokenizer, pre_tokenizers: list[dict[str, Any]]) -> list[str] | None:
    """Characters that encoding leaves out; None where others may be, or be joined to one unknown token."""
    model = backend.model
    if not isinstance(model, BPE):
        return None
    if any(part["type"] == "ByteLevel" for part in pre_tokenizers):
        missing = [byte for byte in _UTF8_BYTES if model.token_to_id(BYTE_CHARACTERS[byte]) is None]
    elif model.byte_fallback:
        missing = [byte for byte in _UTF8_BYTES if model.token_to_id(f"<0x{byte:02X}>") is None]
        return None if missing else []
    else:
        return None
    if any(0x80 <= byte < 0xC0 for byte in missing):  # which end each character beyond ASCII
        return None
    return [chr(byte) for byte in missing if byte < 0x80]


def _keeps_length(part: dict[str, Any]) -> bool:
    """Whether a normalizer leaves at least as many characters, composition apart."""
    if part["type"] == "Replace":
        return len(part["pattern"].get("String", part["content"] + "?")) <= len(part["content"])
    return part["type"] in ("Prepend", "NFC", "NFKC", "NFD", "NFKD", "Lowercase")


def _keeps_characters(part: dict[str, Any]) -> bool:
    return part["type"] in _KEEPING or (part["type"] in ("Split", "Punctuation") and part["behavior"] != "Removed")
