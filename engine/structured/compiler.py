"""`Compiler`: a `StructuredOutput` to a `Language`, by xgrammar."""

import json
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from configs.sampling import StructuredOutput
from configs.settings import EngineConfig
from engine.bundled import locate_model
from engine.checkpoints import open_checkpoint
from engine.text.tokenizer import Tokenizer, load_tokenizer

from .costs import check_costs
from .json_schema import enforceable, parsed_json
from .language import Language, bits_of
from .lark import is_lark, lark_to_ebnf
from .patterns import checked_pattern, string_pattern
from .structural_tag import TagReader

MAX_SOURCE = 256 * 1024
"""Bytes of a source."""
MAX_RULE_BYTES = 32 << 20
"""Size of xgrammar's cache of rules, per vocabulary."""
MAX_SPACES = 20
"""Consecutive white space in JSON: enough for an indented document, and a model cannot fill its answer with it."""

_NOISE = re.compile(r"\[[\d:]+\] \S+:\d+: |Check failed: \(.*?\) is false: |Invalid structural tag error: ")
_LENGTH_LIMIT = re.compile('"(min|max)Length"')
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""What JSON does not allow in strings, but xgrammar does where their length is limited."""


class Compiler:
    """Imports xgrammar, which takes seconds. All methods may be called from any thread.

    Special tokens are no text: only a structural tag that spells or names one can have it in its outputs.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Raises ImportError without xgrammar. `vocab_size` is the model's."""
        import xgrammar

        self._xgrammar = xgrammar
        self._vocab_size = vocab_size
        self._special = {
            token_id: tokenizer.token_bytes(token_id)
            for token_id in {*tokenizer.special_ids, *eos_token_ids}
            if token_id < vocab_size
        }
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokens = [
            b"" if token_id in self._special else tokenizer.token_bytes(token_id) for token_id in range(vocab_size)
        ]
        self._control_ids = {token_id for token_id, raw in enumerate(self._tokens) if _CONTROL.search(raw)}
        self._compiler_for = lru_cache(4)(self._make_compiler)
        self._pattern_for = lru_cache(256)(self._make_pattern)

    def compile(self, structured: StructuredOutput) -> Language:
        """Raises ValueError with the reason for what cannot be compiled."""
        source = structured.source
        if len(source) > MAX_SOURCE or len(source.encode(errors="replace")) > MAX_SOURCE:
            raise ValueError(f"it is longer than {MAX_SOURCE} bytes")
        try:
            kind, source, shown = self._prepared(structured)
            compiler = self._compiler_for(shown)
            options = {"max_whitespace_cnt": MAX_SPACES} if kind == "json_schema" else {}
            compiled = getattr(compiler, f"compile_{kind}")(source, **options)
            hidden = self._special.keys() - shown
            if structured.kind in ("json_schema", "structural_tag") and _LENGTH_LIMIT.search(source):
                hidden |= self._control_ids
            language = Language(compiled, bits_of(hidden, self._vocab_size), compiled.memory_size_bytes)
            language.check_not_empty()
        except (RuntimeError, UnicodeError) as error:  # xgrammar's errors are RuntimeErrors
            raise ValueError(_reason(error)) from error
        return language

    def _prepared(self, structured: StructuredOutput) -> tuple[str, str, frozenset[int]]:
        """The kind and the source for xgrammar, and the special tokens that may be in outputs."""
        kind, source = structured.kind, structured.source
        if kind == "grammar":
            return kind, self._ebnf(source), frozenset()
        if kind == "regex":
            return kind, checked_pattern(source), frozenset()
        if kind == "choice":
            return "structural_tag", json.dumps(_one_of(parsed_json(source))), frozenset()
        if kind == "structural_tag":
            reader = TagReader(self._pattern_for, self._ebnf, self._check_schema, MAX_SPACES)
            tag = reader.read(_bounded(parsed_json(source)))
            return kind, json.dumps(tag), self._shown(json.dumps(tag, ensure_ascii=False), reader.named_ids)
        schema = {"type": "object"} if kind == "json_object" else _bounded(parsed_json(source))
        return "json_schema", json.dumps(enforceable(schema, self._pattern_for)), frozenset()

    def _check_schema(self, schema: Any) -> None:
        self._xgrammar.Grammar.from_json_schema(json.dumps(schema))

    def _ebnf(self, grammar: str) -> str:
        return lark_to_ebnf(grammar, self._xgrammar) if is_lark(grammar) else grammar

    def _shown(self, text: str, named: set[int]) -> frozenset[int]:
        """The special tokens that a structural tag spells or names; one that ends requests stays what it is."""
        spelled = {token_id for token_id, raw in self._special.items() if raw and raw.decode(errors="replace") in text}
        return frozenset(spelled | (named & self._special.keys())) - self._eos_token_ids

    def _make_pattern(self, pattern: str) -> str:
        """For strings in JSON. xgrammar keeps to characters that need no escape there where it builds an automaton."""
        converted = string_pattern(pattern)
        grammar = self._xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "pattern": converted}))
        if "json_string=true" not in str(grammar):
            raise ValueError(f"pattern {pattern[:60]!r} is not supported")
        return converted

    def _make_compiler(self, shown: frozenset[int]) -> Any:
        tokens = list(self._tokens)
        for token_id in shown:
            tokens[token_id] = self._special[token_id]
        # Ids that end a request are the row's own affair, see `Matcher`.
        vocabulary = self._xgrammar.TokenizerInfo(tokens, vocab_size=self._vocab_size, stop_token_ids=[])
        # Languages share rules, such as those of JSON's strings, which take most of the time. All sets of tokens are
        # made here: one of a long enum's, left to the step that needs it, would stop everybody for minutes.
        return self._xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_limit_bytes=MAX_RULE_BYTES)


def load_compiler(config: EngineConfig) -> Compiler:
    """Raises ImportError without xgrammar. The checkpoint is read again: few need its vocabulary here."""
    checkpoint = open_checkpoint(locate_model(config.model))
    tokenizer = load_tokenizer(checkpoint)
    return Compiler(tokenizer, checkpoint.config.vocab_size, tokenizer.eos_token_ids)


def _bounded(document: Any) -> Any:
    check_costs(document)
    return document


def _one_of(texts: Any) -> dict[str, Any]:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("choice must be a list of texts that is not empty")
    elements = [{"type": "const_string", "value": text} for text in texts]
    return {"type": "structural_tag", "format": {"type": "or", "elements": elements}}


def _reason(error: Exception) -> str:
    """xgrammar's message without the places in its source; the input, which some repeat, is cut."""
    return " ".join(_NOISE.sub("", str(error)).split())[:300] or type(error).__name__
