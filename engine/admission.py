"""`WaitingRoom`: the requests that have got no token yet, and whether there is room for more. Imports no torch."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from configs.errors import QueueFull

_MEMORY = 0.98
"""Weight of what was measured before against one more request."""
_LONGEST_WAIT = 60
"""Seconds: nobody is told to stay away for longer."""


class _Place(NamedTuple):
    num_tokens: int
    priority: int


class WaitingRoom:
    """Bounded by requests and by tokens of prompts, so that a wait ends and memory does too.

    Who begins is the scheduler's business: here is only counted. With `by_priority`, a request has no quarrel with
    those behind it: it finds room if those that would run before it leave some, up to twice the bounds in all.
    """

    def __init__(
        self, max_requests: float | None = None, max_tokens: float | None = None, *, by_priority: bool = False
    ) -> None:
        """None: no bound."""
        self._max_requests = math.inf if max_requests is None else max_requests
        self._max_tokens = math.inf if max_tokens is None else max_tokens
        self._by_priority = by_priority
        self.places: dict[str, _Place] = {}
        """By request id."""
        self.num_tokens = 0
        self._seconds = self._num_left = 0.0  # while somebody waited, the newest weighing most
        self._changed = 0.0  # when somebody left, or came into the empty room

    def another(self) -> "WaitingRoom":
        """An empty room with the same bounds."""
        return WaitingRoom(self._max_requests, self._max_tokens, by_priority=self._by_priority)

    def check(self, num_requests: int, num_tokens: int, priority: int = 0) -> None:
        """Raise `QueueFull` unless so many more may wait. Whoever finds the room empty may, whatever their size."""
        requests, tokens = len(self.places) + num_requests, self.num_tokens + num_tokens
        if not self.places or self._fit(requests, tokens):
            return
        if self._by_priority and self._fit(requests / 2, tokens / 2):
            before = [place.num_tokens for place in self.places.values() if place.priority <= priority]
            if not before or self._fit(len(before) + num_requests, sum(before) + num_tokens):
                return
        message = f"{len(self.places)} requests with {self.num_tokens} tokens wait already"
        raise QueueFull(message, retry_after=self.seconds_to_wait())

    def enter(self, request_id: str, num_tokens: int, priority: int = 0) -> None:
        if not self.places:
            self._changed = time.monotonic()
        self.places[request_id] = _Place(num_tokens, priority)
        self.num_tokens += num_tokens

    @contextlib.contextmanager
    def entered(self, request_id: str, num_tokens: Sequence[int], priority: int) -> Iterator[None]:
        """Around the wait of a request's choices, with so many tokens each."""
        names = [f"{request_id}-{index}" for index in range(len(num_tokens))]
        for name, size in zip(names, num_tokens, strict=True):
            self.enter(name, size, priority)
        try:
            yield
        finally:
            for name in names:
                self.leave(name)

    def leave(self, request_id: str) -> None:
        """The request has got its first token, or has ended; without effect on one that is not here."""
        if (place := self.places.pop(request_id, None)) is None:
            return
        self.num_tokens -= place.num_tokens
        now = time.monotonic()
        self._seconds = _MEMORY * self._seconds + now - self._changed
        self._num_left = _MEMORY * self._num_left + 1
        self._changed = now

    def clear(self) -> None:
        """Nobody has left in the ordinary way."""
        self.places.clear()
        self.num_tokens = 0

    def seconds_to_wait(self) -> int:
        """Until those that wait now have begun, at the rate that was measured; at least 1."""
        seconds_each = (self._seconds + time.monotonic() - self._changed) / max(1.0, self._num_left)
        return min(_LONGEST_WAIT, max(1, math.ceil(len(self.places) * seconds_each)))

    def _fit(self, requests: float, tokens: float) -> bool:
        return requests <= self._max_requests and tokens <= self._max_tokens
