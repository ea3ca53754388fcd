"""`python -m server.commands.bench.streaming_client PORT`: reads a server's streams to their end, in its own process.

Standard input: one JSON line of `streams` and `body` per round. Standard output: one JSON line of `events`
for each. Little is parsed, so that the client's cores are left to the server.
"""

import asyncio
import json
import os
import sys


class Stream(asyncio.Protocol):
    """One request on a connection of its own, which the server closes after the response."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.ended = asyncio.get_running_loop().create_future()
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: {")

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


async def read_streams(port: int, num_streams: int, body: bytes) -> dict[str, int]:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(num_streams):
        _, stream = await loop.create_connection(lambda: Stream(head.encode() + body), "127.0.0.1", port)
        streams.append(stream)
    await asyncio.gather(*(stream.ended for stream in streams))
    return {"events": sum(stream.events for stream in streams)}


def main() -> None:
    [port] = sys.argv[1:]
    if hasattr(os, "SCHED_BATCH"):  # each piece would wake the client, which would interrupt what is measured
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for line in sys.stdin:
        round_ = json.loads(line)
        body = json.dumps(round_["body"]).encode()
        print(json.dumps(asyncio.run(read_streams(int(port), round_["streams"], body))), flush=True)


if __name__ == "__main__":
    main()
