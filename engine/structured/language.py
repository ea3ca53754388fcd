"""A compiled `Language`, and the `Matcher` that follows one output through it.

Sets of tokens are bits: int32 [ceil(vocab_size / 32)], the lowest bit of a word first.
"""

import time
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from configs.errors import RequestError
from engine.transfer import upload
from scheduler.request import Request

MAX_TOKEN_TIME = 0.25
"""Seconds of a core's time for one token. A grammar with many ways to read one text may need ever more."""


def bits_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """These ids, and what the last word holds beyond the vocabulary."""
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    flags[list(token_ids)] = True
    flags[vocab_size:] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


class Language:
    """Shared by all outputs that are to belong to it."""

    def __init__(self, compiled: Any, hidden: np.ndarray, num_bytes: int) -> None:
        """`compiled` is an xgrammar.CompiledGrammar; the tokens `hidden` are no part of any output."""
        self.compiled = compiled
        self.visible = ~hidden
        self.num_bytes = num_bytes

    def check_not_empty(self) -> None:
        """Raise ValueError when no output but the empty one belongs to the language."""
        if not Matcher(self, ()).allowed.any():
            raise ValueError("no text belongs to it")


class Languages(Protocol):
    """Those of the requests, as the core asks for them. They are compiled elsewhere: nothing here takes long."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their language, and that `take` has not given yet."""
        ...

    def __contains__(self, request_id: str, /) -> bool:
        """Whether the request waits for its language."""
        ...

    def want(self, request: Request) -> None:
        """Compile the request's language, if nobody has."""
        ...

    def take(self, *, wait: bool) -> list[tuple[Request, RequestError | None]]:
        """Requests whose language is held from now on, or why they have none; waits a few milliseconds if told to."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, or do not want their language any more; others are ignored."""
        ...


class Matcher:
    """Which tokens may come next in one output."""

    def __init__(
        self, language: Language, stop_token_ids: Collection[int], output_token_ids: Iterable[int] = ()
    ) -> None:
        """`stop_token_ids` end the request: they may come where the output belongs to the language."""
        from xgrammar import GrammarMatcher

        self.allowed = language.visible.copy()
        """The tokens that may come next, stop ids included."""
        self.is_complete = False
        """The output belongs to the language, and no longer one that begins so does."""
        self.is_too_slow = False
        self._visible = language.visible
        self._stop_token_ids = frozenset(stop_token_ids)
        self._matcher = GrammarMatcher(language.compiled)
        for token_id in output_token_ids:
            self._matcher.accept_token(token_id)
        self._look_ahead()

    def append(self, token_id: int) -> None:
        """The output grew by one of the allowed tokens. Behind a stop id nothing is looked for."""
        if token_id in self._stop_token_ids:
            return
        start = time.thread_time()
        self._matcher.accept_token(token_id)
        self._look_ahead()
        self.is_too_slow = time.thread_time() - start > MAX_TOKEN_TIME

    def _look_ahead(self) -> None:
        self._matcher.fill_next_token_bitmask(self.allowed)
        self.allowed &= self._visible
        if self._matcher.is_completed():
            self.is_complete = not self.allowed.any()
            for token_id in self._stop_token_ids:
                self.allowed.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def forbid(logits: Tensor, matchers: list[tuple[int, Matcher]]) -> None:
    """-inf for the tokens that may not come next. logits: float32 [rows, vocab]; matchers: (row, its own)"""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        table = logits.numpy()
        for row, matcher in matchers:
            flags = np.unpackbits((~matcher.allowed).view(np.uint8), count=vocab_size, bitorder="little")
            np.copyto(table[row], -np.inf, where=flags.view(bool))
        return
    indices = np.array([row for row, _ in matchers])
    rows, words = upload((indices, np.stack([matcher.allowed for _, matcher in matchers])), logits.device)
    logits[rows] = torch.where(unpacked(words)[:, :vocab_size], logits[rows], -torch.inf)


def unpacked(words: Tensor) -> Tensor:
    """Bits as bools: int32 [rows, words] -> [rows, 32 * words]"""
    return (words[:, :, None] >> torch.arange(32, device=words.device) & 1).bool().flatten(1)
