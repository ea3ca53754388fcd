"""Connections that are no use to anybody."""

import asyncio
import contextlib
import random
from collections import Counter

from .connection import Connection, ConnectionLost, request
from .jobs import MAX_MODEL_LEN

HUGE = {"prompt": "x", "max_tokens": MAX_MODEL_LEN - 1, "ignore_eos": True, "logprobs": 20, "n": 4, "stream": True}
"""More than a connection's buffers hold."""
MOST_SECONDS = 10.0


class Litter:
    """Garbage, halves of requests, silence, more than is read."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.port = port
        self.rng = rng
        self.deeds: Counter[str] = Counter()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self.rng.expovariate(2.0))
            deed = self.rng.choice((self._noise, self._noise, self._half, self._silence, self._pipeline, self._deaf))
            self.deeds[deed.__name__] += 1
            with contextlib.suppress(OSError, ConnectionLost, TimeoutError):
                connection = await Connection.open(self.port, small=deed == self._deaf)
                try:
                    async with asyncio.timeout(MOST_SECONDS):
                        await deed(connection)
                finally:
                    connection.close(abruptly=self.rng.random() < 0.5)

    async def _noise(self, connection: Connection) -> None:
        beginning = self.rng.choice((b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b""))
        connection.writer.write(beginning + self.rng.randbytes(300))
        await asyncio.sleep(self.rng.uniform(0, 0.3))

    async def _half(self, connection: Connection) -> None:
        """A request whose end never comes."""
        whole = request("POST", "/v1/completions", HUGE)
        connection.writer.write(whole[: self.rng.randrange(1, len(whole))])
        await asyncio.sleep(self.rng.choice((0.1, 4.0)))

    async def _silence(self, connection: Connection) -> None:
        await asyncio.sleep(8)

    async def _pipeline(self, connection: Connection) -> None:
        """Three requests at once, of which the answer to one is read."""
        for _ in range(3):
            connection.send("POST", "/v1/completions", {"prompt": "x", "max_tokens": 20})
        await connection.body(await connection.head())

    async def _deaf(self, connection: Connection) -> None:
        """Never reads; the server cuts it off, or it is gone before."""
        connection.send("POST", "/v1/completions", HUGE)
        await asyncio.sleep(self.rng.choice((1.0, 9.0)))
