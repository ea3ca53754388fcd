"""The server under test: what it is asked, what it answers, and when."""

import argparse
import asyncio
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec

from configs.errors import UsageError

from .flags import CHAT

CHECK_INTERVAL = 0.5
"""Seconds between two attempts to reach a server that is not up yet."""

Message = dict[str, Any]


class Request(NamedTuple):
    """A text, token ids or a chat's messages, and how many tokens to generate."""

    prompt: str | list[int] | list[Message]
    output_len: int


class Failure(Exception):
    """Why a request has no whole answer: a refusal, an error within the stream, or something that is no stream."""


def _read_choice(choice: dict[str, Any]) -> tuple[str, bool]:
    """The visible text, and whether the event stands for tokens: neither a role nor a reason for the end does."""
    is_end, delta = choice.get("finish_reason") is not None, choice.get("delta")
    if delta is None:
        text = choice.get("text") or ""
        return text, bool(text) or not is_end
    text = delta.get("content") or ""
    has_more = any(delta.get(name) for name in ("reasoning", "reasoning_content", "tool_calls"))
    return text, bool(text) or has_more or (delta.get("role") is None and not is_end)


@dataclass(slots=True)
class Response:
    """What came of one request. Times are seconds by `time.perf_counter`."""

    due: float
    """When the request should have been sent: what latencies count from."""
    started: float = 0.0
    """When the client came to it. What lies between is the client's queue, or the client's lateness."""
    token_times: list[float] = field(default_factory=list)
    """Of the events that hold tokens."""
    end: float = 0.0
    """Of the last event with a choice, or of the failure."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    text: str = ""
    error: str = ""
    """Why there is no whole answer."""
    _rest: bytes = b""

    def receive(self, data: bytes, now: float) -> None:
        """Read server-sent events, however they are cut. Raises `Failure`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload and payload != b"[DONE]":
                    self._read(payload, now)

    def _read(self, payload: bytes, now: float) -> None:
        try:
            event = msgspec.json.decode(payload)
            error, choices, usage = (event.get(name) for name in ("error", "choices", "usage"))
            text, has_tokens = _read_choice(choices[0]) if choices else ("", False)
            if usage:
                self.has_usage = usage.get("completion_tokens") is not None
                self.output_tokens = int(usage.get("completion_tokens") or 0)
                self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
                self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            if not isinstance(text, str):
                raise TypeError("the content is no text")
        except (msgspec.MsgspecError, AttributeError, LookupError, TypeError, ValueError) as wrong:
            text = payload[:80].decode(errors="replace")
            raise Failure(f"not an event of the protocol: {text} ({wrong})") from None
        if error is not None:
            raise Failure(f"error within the stream: {error_text(payload)}")
        if choices:
            self.end = now
            self.text += text
        if has_tokens:
            self.token_times.append(now)

    def finish(self) -> None:
        """Fill in what only the end of the stream tells. Raises `Failure` for an answer without choices."""
        if not self.end:
            raise Failure("the answer has no choices: is it a stream of the protocol?")
        if not self.token_times:  # one token without text, as an end of sequence is
            self.token_times.append(self.end)
        if not self.has_usage:
            self.output_tokens = len(self.token_times)

    @property
    def ttft(self) -> float:
        return 0.0 if self.error else self.token_times[0] - self.due

    @property
    def e2el(self) -> float:
        return 0.0 if self.error else self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds from the first token to the end, per token after the first; None for a single token."""
        return (self.end - self.token_times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between events that hold tokens."""
        times = [] if self.error else self.token_times
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def client_queue_time(self) -> float:
        return max(0.0, self.started - self.due)


def error_text(body: bytes | bytearray) -> str:
    """The message within an error's body, as OpenAI, or a plain `detail` or `message`, has it; else its beginning."""
    try:
        found = msgspec.json.decode(body)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and name in found:
                found = found[name]
    except msgspec.MsgspecError:
        found = body.decode(errors="replace")
    return " ".join(str(found).split())[:300]


class _Reply:
    """An HTTP response as it comes: llhttp calls what begins with `on`."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        """What was read of it and not yet taken."""
        self.has_headers = self.has_length = self.is_complete = self.keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.is_complete = self.parser.get_status_code() >= 200
        self.keeps_alive = self.parser.should_keep_alive()


class HttpClient:
    """One server over as many connections as there are requests under way; idle connections are used again.

    A general client would measure a burst of requests late: aiohttp takes 600 µs of the processor for a request on a
    new connection and 15 µs for an event of a stream, httpx 76 µs for an event, and this 80 µs and 8 µs.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None, *, timeout: float, verify: bool = True) -> None:
        """`timeout` is in seconds, for a whole response."""
        self.timeout = timeout
        parts = urlsplit(url)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._place: dict[str, Any] = {"host": parts.hostname, "port": parts.port or 80}
        if parts.scheme == "https":
            context = ssl.create_default_context()
            context.check_hostname = verify
            context.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
            self._place |= {"port": parts.port or 443, "ssl": context}
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(self, method: str, path: str, body: bytes, receive: Callable[[bytes, float], None]) -> None:
        """`receive` gets the body piece by piece, each with the time at which it was read.

        Raises `Failure` for a status other than 200 and for a broken answer, or `OSError`, of which a timeout is one.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        async with asyncio.timeout(self.timeout):
            while True:
                is_fresh, reply = not self._idle, _Reply()
                reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(**self._place)
                try:
                    writer.write(head.encode() + body)
                    await self._read(reader, reply, receive)
                except BaseException as error:
                    writer.transport.abort()
                    if is_fresh or reply.has_headers or not isinstance(error, (OSError, Failure)):
                        raise
                    continue  # an idle connection that the server closed just before: not an answer to this request
                if reply.keeps_alive:
                    self._idle.append((reader, writer))
                else:
                    writer.close()
                return

    async def _read(self, reader: asyncio.StreamReader, reply: _Reply, receive: Callable[[bytes, float], None]) -> None:
        while not reply.is_complete:
            data = await reader.read(2**16)
            now = time.perf_counter()
            if not data:
                if reply.has_headers and not reply.has_length:
                    break  # a body that ends with its connection
                raise Failure("the server closed the connection before the end of its answer")
            try:
                reply.parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise Failure(f"not HTTP: {error}") from error
            if reply.body and reply.parser.get_status_code() == 200:
                receive(bytes(reply.body), now)
                reply.body.clear()
        if reply.parser.get_status_code() != 200:
            raise Failure(f"HTTP {reply.parser.get_status_code()}: {error_text(reply.body)}")

    def close(self) -> None:
        for _, writer in self._idle:
            writer.transport.abort()


class Target:
    """Sends prompts to one endpoint of an OpenAI-style server."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self.url = url
        self.model = arguments.model
        self.endpoint = arguments.endpoint
        key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
        headers = ({"Authorization": f"Bearer {key}"} if key else {}) | dict(arguments.header)
        self.client = HttpClient(url, headers, timeout=arguments.request_timeout_sec, verify=not arguments.insecure)
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        fields |= {"ignore_eos": arguments.ignore_eos or None, "temperature": arguments.temperature}
        fields |= arguments.extra_body or {}
        self._fields = {name: value for name, value in fields.items() if value is not None}

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until the server lists its models. Raises `UsageError` when it does not."""
        deadline, listed = time.monotonic() + seconds, bytearray()
        while True:
            listed.clear()
            try:
                await self.client.request("GET", "/v1/models", b"", lambda piece, _: listed.extend(piece))
                models = msgspec.json.decode(listed, type=dict[str, Any]).get("data")
                break
            except (Failure, msgspec.MsgspecError) as error:
                if self.model is not None:  # a server need not list models
                    return
                raise UsageError(f"{self.url}/v1/models: {error}; give its model's name with --model") from error
            except OSError as error:
                if time.monotonic() >= deadline:
                    hint = "start the server, or wait for it with --ready-check-timeout-sec 60"
                    raise UsageError(f"no server answers at {self.url} ({error}); {hint}") from error
                await asyncio.sleep(CHECK_INTERVAL)
        if self.model is None:
            if not models:
                raise UsageError(f"{self.url}/v1/models lists no model; give its name with --model")
            self.model = models[0]["id"]

    async def check(self, request: Request) -> Response:
        """The response to one request. Raises `UsageError` with what the server says against it."""
        response = await self.send(request)
        if response.error:
            raise UsageError(f"{self.url}{self.endpoint} does not answer a first request: {response.error}")
        return response

    async def send(self, request: Request, due: float | None = None) -> Response:
        """What comes of a request, whatever happens. `due`: when it should have been sent, if not now."""
        now = time.perf_counter()
        response = Response(now if due is None else due, now)
        asked: dict[str, Any] = {"prompt": request.prompt, "max_tokens": request.output_len}
        if self.endpoint == CHAT:
            asked = {"messages": as_messages(request.prompt), "max_completion_tokens": request.output_len}
        body = msgspec.json.encode({"model": self.model, **self._fields, **asked})
        try:
            await self.client.request("POST", self.endpoint, body, response.receive)
            response.finish()
        except (OSError, Failure) as error:
            is_late = isinstance(error, TimeoutError)
            text = f"no whole answer within {self.client.timeout:g} s" if is_late else str(error)
            response.error = text or type(error).__name__
            response.end = time.perf_counter()
        return response


def as_messages(prompt: str | list[int] | list[Message]) -> list[Message]:
    """A chat's messages; a text is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    assert all(isinstance(message, dict) for message in prompt), "token ids need /v1/completions"
    return [message for message in prompt if isinstance(message, dict)]
