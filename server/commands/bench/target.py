"""The server under test: what it is asked, what it answers, and when."""

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from configs.errors import UsageError

from .flags import COMPLETIONS

CHECK_INTERVAL = 0.5
"""Seconds between two attempts to reach a server that is not up yet."""

Message = dict[str, Any]


class Request(NamedTuple):
    """A text, token ids or a chat's messages, and how many tokens to generate."""

    prompt: str | list[int] | list[Message]
    output_len: int


class Failure(Exception):
    """Why a request has no whole answer: a refusal, an error within the stream, or something that is no stream."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def read(self) -> tuple[str, bool]:
        """The visible text, and whether the event stands for tokens: neither a role nor a reason for the end does."""
        delta = self.delta
        if delta is None:
            text = self.text or ""
            return text, bool(text) or self.finish_reason is None
        text = delta.content or ""
        if text or delta.reasoning or delta.reasoning_content or delta.tool_calls:
            return text, True
        return text, delta.role is None and self.finish_reason is None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


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
    pieces: list[str] = field(default_factory=list)
    error: str | None = None
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
            event = _EVENTS.decode(payload)
        except msgspec.MsgspecError as error:
            raise Failure(f"not an event of the protocol: {payload[:80].decode(errors='replace')} ({error})") from None
        if event.error is not None:
            raise Failure(f"error within the stream: {error_text(payload)}")
        if event.choices:
            text, has_tokens = event.choices[0].read()
            self.end = now
            if has_tokens:
                self.token_times.append(now)
            if text:
                self.pieces.append(text)
        if usage := event.usage:
            self.has_usage = usage.completion_tokens is not None
            self.output_tokens = usage.completion_tokens or 0
            self.prompt_tokens = usage.prompt_tokens or 0
            self.cached_tokens = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0

    def finish(self) -> None:
        """Fill in what only the end of the stream tells. Raises `Failure` for an answer without content."""
        if not self.end:
            raise Failure("the answer has no choices: is it a stream of the protocol?")
        if not self.token_times:  # one token without text, as an end of sequence is
            self.token_times.append(self.end)
        if not self.has_usage:
            self.output_tokens = len(self.token_times)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.due

    @property
    def e2el(self) -> float:
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds from the first token to the end, per token after the first; None for a single token."""
        return (self.end - self.token_times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between events that hold tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def queue_time(self) -> float:
        return max(0.0, self.started - self.due)


def error_text(body: bytes) -> str:
    """The message within an error's body, as OpenAI, or a plain `detail` or `message`, has it; else its beginning."""
    try:
        found = msgspec.json.decode(body)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and name in found:
                found = found[name]
    except msgspec.MsgspecError:
        found = body.decode(errors="replace")
    return " ".join(str(found).split())[:300]


class HttpClient:
    """One server over as many connections as there are requests under way; idle connections are used again."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, *, timeout: float, verify: bool = True) -> None:
        """`timeout` is in seconds, for a whole response. Needs a running event loop."""
        self.url = url
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=verify),
            # a proxy that compresses a stream would hold its events back
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})},
            timeout=aiohttp.ClientTimeout(total=timeout),
            trace_configs=[trace],
        )

    async def request(self, method: str, path: str, body: bytes, receive: Callable[[bytes, float], None]) -> None:
        """`receive` gets the body piece by piece, each with the time at which it was read.

        Raises `Failure` for a status other than 200, `aiohttp.ClientError` or `OSError`, of which a timeout is one.
        """
        while True:
            reused: list[bool] = []
            options: dict[str, Any] = {"data": body, "allow_redirects": False, "trace_request_ctx": reused}
            try:
                response = await self._session.request(method, self.url + path, **options)
            except aiohttp.ClientConnectionError:
                if not reused:
                    raise
                continue  # an idle connection that the server closed just before: not an answer to this request
            async with response:
                if response.status != 200:
                    raise Failure(f"HTTP {response.status}: {error_text(await response.read())}")
                async for piece in response.content.iter_any():
                    receive(piece, time.perf_counter())
                return

    async def close(self) -> None:
        await self._session.close()


async def _note_reuse(session: Any, context: Any, params: Any) -> None:
    context.trace_request_ctx.append(True)


class Target:
    """Sends prompts to one endpoint of an OpenAI-style server."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self.url = url
        self.model = arguments.model
        self.endpoint = arguments.endpoint
        self._timeout = arguments.request_timeout_sec
        key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
        headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **dict(arguments.header)}
        base = url.rstrip("/").removesuffix("/v1")
        self._client = HttpClient(base, headers, timeout=self._timeout, verify=not arguments.insecure)
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if arguments.ignore_eos:
            fields["ignore_eos"] = True
        if arguments.temperature is not None:
            fields["temperature"] = arguments.temperature
        fields |= arguments.extra_body or {}
        self._fields = {name: value for name, value in fields.items() if value is not None}

    async def wait_until_ready(self, seconds: float) -> None:
        """Wait until the server lists its models. Raises `UsageError` when it does not."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                listed = await self._models()
                break
            except Failure as error:
                if self.model is not None:  # a server need not list models
                    return
                raise UsageError(f"{self.url}/v1/models: {error}; give the model's name with --model") from error
            except (OSError, aiohttp.ClientError) as error:
                if time.monotonic() >= deadline:
                    hint = "start the server, or wait for it with --ready-check-timeout-sec 60"
                    raise UsageError(f"no server answers at {self.url} ({error}); {hint}") from error
                await asyncio.sleep(CHECK_INTERVAL)
        if self.model is None:
            models = listed.get("data") if isinstance(listed, dict) else None
            if not models:
                raise UsageError(f"{self.url}/v1/models lists no model; give its name with --model")
            self.model = models[0]["id"]

    async def _models(self) -> Any:
        pieces: list[bytes] = []
        await self._client.request("GET", "/v1/models", b"", lambda piece, _: pieces.append(piece))
        try:
            return msgspec.json.decode(b"".join(pieces))
        except msgspec.MsgspecError as error:
            raise Failure(f"not JSON: {error}") from error

    async def check(self, request: Request) -> Response:
        """The response to one request. Raises `UsageError` with what the server says against it."""
        response = Response(time.perf_counter())
        await self.send(request, response)
        if response.error is not None:
            raise UsageError(f"{self.url}{self.endpoint} does not answer a first request: {response.error}")
        return response

    async def send(self, request: Request, response: Response) -> None:
        """Fill in `response`, whatever happens."""
        response.started = time.perf_counter()
        try:
            await self._client.request("POST", self.endpoint, self._body(request), response.receive)
            response.finish()
        except TimeoutError:
            response.error = f"no whole answer within {self._timeout:g} s"
        except (OSError, aiohttp.ClientError, Failure) as error:
            response.error = str(error) or type(error).__name__
        if response.error is not None:
            response.end = time.perf_counter()

    def _body(self, request: Request) -> bytes:
        fields = {"model": self.model, **self._fields}
        if self.endpoint == COMPLETIONS:
            fields |= {"prompt": request.prompt, "max_tokens": request.output_len}
        else:
            fields |= {"messages": as_messages(request.prompt), "max_completion_tokens": request.output_len}
        return msgspec.json.encode(fields)

    async def close(self) -> None:
        await self._client.close()


def as_messages(prompt: str | list[int] | list[Message]) -> list[Message]:
    """A chat's messages; a text is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    assert all(isinstance(message, dict) for message in prompt), "token ids need /v1/completions"
    return [message for message in prompt if isinstance(message, dict)]
