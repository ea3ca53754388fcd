"""The token ids with which an encoder writes a word, and those with which a model may."""

from collections.abc import Callable, Collection

from .tokenizer import Tokenizer


def word_tokens(tokenizer: Tokenizer, word: str) -> set[tuple[int, ...]]:
    """Of the word with a space before it and of the word without one, wherever it begins. Empty for no tokens at all.

    An encoder writes a word's beginning in several ways: SentencePiece puts a space before a text, and other words
    before it may keep it from doing so. So the word is encoded in several places, and of each result the ids count
    that stand for the word's own bytes.
    """
    word = word.lstrip(" ") or word
    forms = {word.encode(errors="replace"), b" " + word.encode(errors="replace")}
    longest = max(map(len, forms))
    found = set()
    for before in ("", " ", "\n", "\n "):
        token_ids = tokenizer.encode(before + word, add_special_tokens=False)
        raw = b""
        for start in reversed(range(len(token_ids))):
            raw = tokenizer.token_bytes(token_ids[start]) + raw
            if raw in forms:
                found.add(tuple(token_ids[start:]))
            if len(raw) > longest:
                break
    if found:
        return found
    whole = tuple(tokenizer.encode(word, add_special_tokens=False))  # a normaliser has changed its characters
    return {whole} if whole else set()


def marker_parts(markers: Collection[str]) -> Callable[[str], bool]:
    """Tells whether a token's text can hold a part of a marker where a text is cut anywhere, or is white space."""
    markers = [marker for marker in markers if marker]
    begins = tuple(marker[:count] for marker in markers for count in range(1, len(marker)))
    ends = tuple(marker[count:] for marker in markers for count in range(1, len(marker)))
    return lambda text: (
        text.startswith(ends)
        or text.endswith(begins)
        or text.isspace()
        or any(marker in text or text in marker for marker in markers)
    )
