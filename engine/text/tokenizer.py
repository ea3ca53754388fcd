"""Text to token ids and back."""

import codecs
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import tokenizers

from engine.checkpoints.checkpoint import Checkpoint, TokenizerFiles
from engine.checkpoints.gguf_vocabulary import TURN_ENDS, GGUFVocabulary

from .gguf_vocab import build_tokenizer
from .token_bound import TokenBound
from .token_spelling import spelling_of
from .tokenizer_files import read_tokenizer

# One text is encoded per call, so the library's thread pool would only take cores from the engine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SURROGATE = re.compile("[\ud800-\udfff]")


def load_tokenizer(checkpoint: Checkpoint) -> "Tokenizer":
    """Raises CheckpointError when the checkpoint's tokenizer is missing, broken or of an unknown kind."""
    source = checkpoint.tokenizer_source
    if isinstance(source, TokenizerFiles):
        backend, special_tokens = read_tokenizer(source, checkpoint.config.vocab_size)
    else:
        backend, special_tokens = build_tokenizer(source), _named_tokens(source)
    tokenizer = Tokenizer(backend, special_tokens, checkpoint.chat_template)
    templates = "".join(checkpoint.chat_templates.values())
    turn_ends = (tokenizer.special_id(text) for text in sorted(TURN_ENDS) if text in templates)
    ends = (*checkpoint.eos_token_ids, tokenizer.eos_token_id, *turn_ends)
    size = checkpoint.config.vocab_size
    tokenizer.eos_token_ids = tuple(dict.fromkeys(i for i in ends if i is not None and i < size))
    return tokenizer


def _named_tokens(vocabulary: GGUFVocabulary) -> dict[str, str]:
    ids = {
        "bos_token": vocabulary.bos_token_id,
        "eos_token": vocabulary.eos_token_id,
        "unk_token": vocabulary.unk_token_id,
        "pad_token": vocabulary.pad_token_id,
    }
    return {name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None}


class Tokenizer:
    """Immutable after loading; all methods may be called from any thread."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], chat_template: str | None = None
    ) -> None:
        self._backend = backend
        self._spelling = spelling_of(backend.decoder)
        # Both are filled as ids are asked for: start-up need not walk the vocabulary.
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[frozenset[int], dict[int, str]] = defaultdict(dict)
        """For `TextStream`, by what it hides: texts of ids that begin and end between two characters."""
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.special_tokens = special_tokens
        """`bos_token`, `eos_token`, … for chat templates; names without a token are absent."""
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size()
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.eos_token_ids: tuple[int, ...] = ()
        """Every id that ends a sequence: the checkpoint's, the tokenizer's own, and those with which its chat templates
        end a turn."""

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @property
    def leading_spaces(self) -> int:
        """Spaces that decoding drops at the start of a text: SentencePiece puts one there when it encodes."""
        return self._spelling.leading_spaces

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Spellings of special tokens inside it become those tokens, as in transformers.

        Lone surrogates, which UTF-8 cannot hold, count as U+FFFD. The GIL is free while a long text is encoded.
        """
        # encode() would hold the GIL, and the others compute offsets that nobody reads.
        [encoding] = self._backend.encode_batch_fast([_well_formed(text)], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def bound(self) -> TokenBound:
        """Made when it is first asked for: it walks the vocabulary."""
        return TokenBound(self._backend)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids: their bytes joined, and U+FFFD for what is not UTF-8.

        Differs from transformers in one case: of a run of SentencePiece byte tokens that is not valid as a whole,
        the valid characters are kept.
        """
        stream = TextStream(self, skip_special_tokens=skip_special_tokens)
        return "".join(map(stream.push, token_ids)) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes, perhaps part of a character; b"" for ids beyond the tokenizer's vocabulary."""
        raw = self._bytes.get(token_id)
        if raw is None:
            token = self._backend.id_to_token(token_id)
            raw = self._bytes[token_id] = b"" if token is None else self._spelling.to_bytes(token)
        return raw

    def spellings(self) -> Iterator[tuple[int, bytes]]:
        """All ids with their raw bytes. Walks the vocabulary, which takes a part of a second, and keeps nothing."""
        for token_id in range(self.vocab_size):
            token = self._backend.id_to_token(token_id)
            if token is not None:
                yield token_id, self._spelling.to_bytes(token)

    def token(self, token_id: int) -> str:
        """Spelling of a token in the vocabulary; "" for ids beyond it."""
        token: str | None = self._backend.id_to_token(token_id)
        return token or ""

    def special_id(self, text: str) -> int | None:
        """The id of the special token, which texts leave out, that is spelled so; None without one."""
        token_id = self.token_id(text)
        return token_id if token_id in self.special_ids else None


class TextStream:
    """The text of a token sequence, piece by piece: a character comes out when its last byte is there.

    `prompt_token_ids` were decoded before: their text does not come out, but a character that their last byte
    left open is completed, and the space that SentencePiece drops at the start of a text is dropped there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        shown_token_ids: Collection[int] = (),
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`shown_token_ids` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self.hidden_ids: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        if shown_token_ids:
            self.hidden_ids -= frozenset(shown_token_ids)
        self._leading_spaces = tokenizer.leading_spaces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip_prompt(prompt_token_ids)
        self._texts = tokenizer.texts[self.hidden_ids]
        self._between_characters = self._is_between_characters()

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        if self._between_characters and (known := self._texts.get(token_id)) is not None:
            return known
        text = self._decoder.decode(self._visible_bytes(token_id))
        began_between, self._between_characters = self._between_characters, self._is_between_characters()
        if began_between and self._between_characters:
            self._texts[token_id] = text
        return text

    def finish(self) -> str:
        """U+FFFD when the sequence ends inside a character."""
        return self._decoder.decode(b"", final=True)

    def _is_between_characters(self) -> bool:
        """Whether a token's text does not depend on those before it."""
        return not self._leading_spaces and not self._decoder.getstate()[0]

    def _visible_bytes(self, token_id: int) -> bytes:
        if token_id in self.hidden_ids:
            return b""
        raw = self._tokenizer.token_bytes(token_id)
        if self._leading_spaces and raw:
            kept = raw[min(self._leading_spaces, len(raw) - len(raw.lstrip(b" "))) :]
            self._leading_spaces = 0 if kept else self._leading_spaces - len(raw)
            return kept
        return raw

    def _skip_prompt(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not self._leading_spaces:
                break
            self._visible_bytes(token_id)
        leading_spaces, self._leading_spaces = self._leading_spaces, 0
        tail = b""
        for token_id in reversed(token_ids):
            if len(tail) >= 3:  # bytes of the longest unfinished character
                break
            tail = self._visible_bytes(token_id) + tail
        self._decoder.decode(tail[-3:])
        self._leading_spaces = leading_spaces


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text
