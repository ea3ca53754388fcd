"""A server of OpenAI's streams whose delays the test sets, on a thread of its own."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


@dataclass
class Behaviour:
    """Delays in seconds."""

    first: float = 0.0
    between: float = 0.0
    places: int | None = None
    """Requests that are served at once; others wait."""
    stall: tuple[int, float] | None = None
    """From the request of this number on, and for how long, nothing begins."""
    fail: Callable[[int], str | None] = lambda number: None
    """Of the request of this number: None, `refuse`, `break`, `error`, or `silent`."""
    sends_usage: bool = True
    takes_token_ids: bool = True
    tokens_per_word: int = 1
    extra_prompt_tokens: int = 0
    tokens_per_event: int = 1
    bodies: list[Body] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    num_connections: int = 0
    raw_models: bytes = b""
    raw_answer: bytes | None = None
    """Sent in place of the list of models, and of answers, after which the connection ends."""
    closes_after: int | None = None
    """Answers of a connection before the server closes it without a word."""

    def num_prompt_tokens(self, body: Body) -> int:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return len(prompt)
        texts = [prompt] if prompt is not None else [message["content"] for message in body["messages"]]
        return sum(len(text.split()) for text in texts) * self.tokens_per_word + self.extra_prompt_tokens


class _Handler:
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.places = asyncio.Semaphore(behaviour.places or 10**6)
        self.stalled_until = 0.0
        self.number = 0

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.behaviour.num_connections += 1
        answered = 0
        try:
            while self.behaviour.closes_after is None or answered < self.behaviour.closes_after:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                _, _, length = head.lower().partition("content-length: ")
                body = await reader.readexactly(int(length.partition("\r\n")[0] or 0))
                await self.answer(head, body, writer)
                answered += 1
            await asyncio.sleep(0.02)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, head: str, raw: bytes, writer: asyncio.StreamWriter) -> None:
        raw_answer = (self.behaviour.raw_models or None) if head.startswith("GET") else self.behaviour.raw_answer
        if raw_answer is not None:
            writer.write(raw_answer)
            await writer.drain()
            raise ConnectionError
        if head.startswith("GET"):
            await self.whole(writer, 200, {"data": [{"id": "fake"}]})
            return
        if "completions" not in head.partition("\r\n")[0]:
            await self.whole(writer, 404, {"detail": "not found"})
            return
        behaviour, body = self.behaviour, json.loads(raw)
        if isinstance(body.get("prompt"), list) and not behaviour.takes_token_ids:
            await self.whole(writer, 400, {"error": {"message": "prompt must be a text"}})
            return
        is_check = (body.get("max_tokens") or body.get("max_completion_tokens")) == 1
        number, how = self.number, None
        if not is_check:
            behaviour.bodies.append(body)
            behaviour.heads.append(head)
            how = behaviour.fail(number)
            self.number += 1
            if behaviour.stall and number == behaviour.stall[0]:
                self.stalled_until = time.perf_counter() + behaviour.stall[1]
        if how == "refuse":
            await self.whole(writer, 503, {"error": {"message": "too busy"}})
            return
        async with self.places:
            await asyncio.sleep(self.stalled_until - time.perf_counter())
            await self.stream(writer, head, body, how)

    async def whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        await writer.drain()

    async def stream(self, writer: asyncio.StreamWriter, head: str, body: Body, how: str | None) -> None:
        is_chat = "messages" in body
        count = body["max_completion_tokens" if is_chat else "max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
        if is_chat:
            self.event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(0, count, self.behaviour.tokens_per_event):
            await asyncio.sleep(self.behaviour.between if index else self.behaviour.first)
            if how == "silent":
                await asyncio.sleep(60)
            if how == "break" and index:
                writer.transport.abort()
                raise ConnectionError
            if how == "error" and index:
                self.event(writer, {"error": {"message": "out of memory"}})
            text = f" w{index}"
            piece = {"delta": {"content": text}} if is_chat else {"text": text}
            self.event(writer, {"choices": [{"index": 0, **piece, "finish_reason": None}]})
        piece = {"delta": {}} if is_chat else {"text": ""}
        self.event(writer, {"choices": [{"index": 0, **piece, "finish_reason": "length"}]})
        if self.behaviour.sends_usage and body.get("stream_options"):
            usage = {"prompt_tokens": self.behaviour.num_prompt_tokens(body), "completion_tokens": count}
            self.event(writer, {"choices": [], "usage": usage})
        text = b"data: [DONE]\n\n"
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n0\r\n\r\n")

    def event(self, writer: asyncio.StreamWriter, value: Any) -> None:
        text = b"data: " + json.dumps(value).encode() + b"\n\n"
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")


@contextmanager
def fake_server(behaviour: Behaviour) -> Iterator[str]:
    """Its URL."""
    ready, url = threading.Event(), ""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        nonlocal url
        server = await asyncio.start_server(_Handler(behaviour).connection, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
