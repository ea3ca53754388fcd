"""`SamplingParams`: how one request is decoded."""

import math
import reprlib
from collections.abc import Iterable
from typing import Literal

import msgspec

from configs.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_BEAMS = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10
MAX_PATTERN_SIZE = 1024
MAX_BAD_WORDS = 256
MAX_WORD = 256
_REPR = reprlib.Repr()
_REPR.maxother = 200
"""Errors quote the beginning of a long value."""


class StructuredOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The language that the output has to belong to. The core compiles it, see engine/structured."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
    source: str = ""
    """By kind: nothing; a JSON schema; a regular expression; a JSON list of texts; EBNF; xgrammar's structural tag."""


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The texts around the reasoning part that an output may begin with."""

    closing: str
    opening: str = ""
    """Without one the output begins inside."""


class ThinkingBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Most tokens of the reasoning part; then its end is forced."""

    max_tokens: int
    end: tuple[int, ...]
    """Token ids that write the closing marker."""
    begin: tuple[int, ...] = ()
    """Token ids that write the opening marker. Nothing is counted before it; without it, the output begins inside."""
    closing: str = ""
    opening: str = ""
    """The markers' texts, by which both are found however a model spells them. The engine's text side fills them in."""
    spellings: dict[int, str] = {}
    """The texts of all tokens that can be part of a marker, by id. The engine's text side fills them in, too."""


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pattern of `min_pattern_size` to `max_pattern_size` tokens that the output ends with `min_count` times."""

    max_pattern_size: int = 0
    """0: nothing is looked for."""
    min_pattern_size: int = 0
    min_count: int = 0

    @property
    def is_valid(self) -> bool:
        sizes = 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE
        return sizes and (self.max_pattern_size == 0 or 2 <= self.min_count <= MAX_PATTERN_SIZE)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when it ends.

    Out-of-range values raise `InvalidRequest` whose `param` is the field's name.
    The order of operations is in `engine/sampler.py`.
    """

    n: int = 1
    """Independent choices for the prompt."""
    max_tokens: int | None = 16
    """Most tokens to generate; None means as many as the context holds, 0 that only the prompt is computed."""
    min_tokens: int = 0
    """End-of-sequence, stop ids and stop strings are held off until this many tokens exist."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 and -1 keep all."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities reach this sum; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted once from each token that the output holds; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv 1909.05858)."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these ids; -100 to 100."""
    bad_token_ids: tuple[int, ...] = ()
    """Ids that are never chosen."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these ids are chosen; without any, all are."""
    bad_words: tuple[str, ...] = ()
    """Texts that the output does not hold. The engine's text side makes `bad_sequences` of them."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output does not hold: the last id is not chosen where the others came before."""
    thinking: ThinkingBudget | None = None
    reasoning: Reasoning | None = None
    """Where it is given, stop strings count behind the reasoning part only."""
    structured: StructuredOutput | None = None
    """Only tokens that keep the output within this language are chosen; it ends where the language does."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens, whatever else is in the batch."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at these ids, beside the checkpoint's end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the stop token's text, at the end of the text."""
    ignore_eos: bool = False
    """Do not end at the checkpoint's end-of-sequence ids."""
    repetition_detection: RepetitionDetection | None = None
    """Generation ends, with a reason of its own, once the output repeats itself."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    shown_token_ids: tuple[int, ...] = ()
    """But for these."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of this many likeliest ones, from the raw model distribution."""
    logprob_token_ids: tuple[int, ...] = ()
    """With `logprobs`: these ids' log-probabilities come behind the likeliest ones."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each token of the prompt but the first, which nothing predicts."""
    pooling: Literal["last", "mean"] | None = None
    """The request is an embedding: the last of the prompt's final hidden states, or their mean. Needs max_tokens 0."""

    def __post_init__(self) -> None:
        _check("n", self.n >= 1, self.n, "at least 1")
        _check("max_tokens", self.max_tokens is None or self.max_tokens >= 0, self.max_tokens, "at least 0")
        _check("min_tokens", self.min_tokens >= 0, self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _check("min_tokens", self.min_tokens <= self.max_tokens, self.min_tokens, "at most max_tokens")
        _check("temperature", 0 <= self.temperature < math.inf, self.temperature, "a number of at least 0")
        _check("top_k", self.top_k >= -1, self.top_k, "at least 1, or 0 or -1 for no limit")
        _check("top_p", 0 < self.top_p <= 1, self.top_p, "above 0 and at most 1")
        _check("min_p", 0 <= self.min_p <= 1, self.min_p, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, -2 <= value <= 2, value, "between -2 and 2")
        _check(
            "repetition_penalty",
            0 < self.repetition_penalty < math.inf,
            self.repetition_penalty,
            "a number above 0",
        )
        _check("seed", self.seed is None or -(2**63) <= self.seed < 2**64, self.seed, "a 64-bit integer")
        if (repetition := self.repetition_detection) is not None:
            wanted = f"sizes of 0 <= min <= max <= {MAX_PATTERN_SIZE} and 2 <= min_count <= {MAX_PATTERN_SIZE}"
            _check("repetition_detection", repetition.is_valid, repetition, wanted)
        _check("stop", all(self.stop), "", "non-empty strings")
        for token_id, bias in (self.logit_bias or {}).items():
            _check("logit_bias", -100 <= bias <= 100, {token_id: bias}, "between -100 and 100")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(name, count is None or 0 <= count <= MAX_LOGPROBS, count, f"between 0 and {MAX_LOGPROBS}")
        words = len(self.bad_words) <= MAX_BAD_WORDS and all(0 < len(word) <= MAX_WORD for word in self.bad_words)
        _check("bad_words", words, len(self.bad_words), f"at most {MAX_BAD_WORDS} texts of 1 to {MAX_WORD} characters")
        needed = self.logprobs is not None or not self.logprob_token_ids
        _check("logprob_token_ids", needed, self.logprob_token_ids, "used with logprobs")
        _check("bad_sequences", all(self.bad_sequences), self.bad_sequences, "non-empty sequences")
        if self.thinking is not None:
            _check("thinking", self.thinking.max_tokens >= 0 and bool(self.thinking.end), self.thinking, "a budget")
        _check("pooling", self.pooling is None or self.max_tokens == 0, self.max_tokens, "used with max_tokens 0")

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` for ids outside the vocabulary of `vocab_size` tokens."""
        names = ("stop_token_ids", "bad_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias")
        given: list[tuple[str, Iterable[int]]] = [(name, getattr(self, name) or ()) for name in names]
        given += [("bad_sequences", sequence) for sequence in self.bad_sequences]
        if self.thinking is not None:
            given += [("thinking", self.thinking.end), ("thinking", self.thinking.begin)]
        for name, token_ids in given:
            for token_id in token_ids:
                inside = 0 <= token_id < vocab_size
                _check(name, inside, token_id, f"token ids between 0 and {vocab_size - 1}")

    def for_choice(self, index: int) -> "SamplingParams":
        """Parameters of choice `index` of n: one choice each, seeds that differ but can be reproduced."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else (self.seed + index) % 2**64
        return msgspec.structs.replace(self, n=1, seed=seed)


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the likeliest outputs of a prompt are searched for. Out-of-range values raise `InvalidRequest`."""

    beam_width: int
    """Sequences that are followed, and given."""
    max_tokens: int
    """Most tokens of each."""
    ignore_eos: bool = False
    length_penalty: float = 1.0
    """A sequence's score is the sum of its log-probabilities over length ** length_penalty."""

    def __post_init__(self) -> None:
        _check("beam_width", 1 <= self.beam_width <= MAX_BEAMS, self.beam_width, f"between 1 and {MAX_BEAMS}")
        _check("max_tokens", self.max_tokens >= 1, self.max_tokens, "at least 1")
        most = MAX_LENGTH_PENALTY
        _check("length_penalty", abs(self.length_penalty) <= most, self.length_penalty, f"between -{most} and {most}")


def _check(param: str, ok: bool, value: object, wanted: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} must be {wanted}; got {_REPR.repr(value)}", param=param)
