"""Events as bytes: encoded, kept, and read from any place."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from server.protocol.response_events import Event
from server.sse import named_event


def encoded(events: Sequence[Event]) -> list[bytes]:
    return [named_event(event.type, msgspec.json.encode(event)) for event in events]


class Tape:
    """The events of one response. Event `n` has the sequence number `n`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._ended = False
        self._grown = asyncio.Event()

    def write(self, events: Sequence[Event]) -> None:
        new = encoded(events)
        self._events += new
        self.num_bytes += sum(map(len, new))
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """From event `start` on, what is there and what comes."""
        while True:
            grown = self._grown
            if new := self._events[start:]:
                start += len(new)
                yield b"".join(new)
            elif self._ended:
                return
            else:
                await grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()
