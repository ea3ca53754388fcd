"""One client's connection: uvicorn's, with bounds on what a client may send, and for how long.

What is no HTTP, is too much or too slow is answered here, as the application would: with an error object.
"""

import asyncio
import time
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from configs.errors import InvalidRequest, RequestError
from configs.settings import ServerConfig
from server.errors import openai_error
from server.security.request_ids import HEADER, request_id
from server.stalled_clients import bytes_waiting

BYTES_PER_SECOND = 16 * 2**10
"""Of a request, so many earn it another second to arrive in."""
LINGER = 2.0
"""Seconds for which what a refused client still sends is thrown away: closing at once could take the answer from it."""


class HeaderTooLarge(RequestError):
    status = 431
    type = "invalid_request_error"


class TooSlow(RequestError):
    status = 408
    type = "timeout_error"


class UntilClose(int):
    """The length of a body that ends with the connection, as HTTP/1.0 has it: whatever is sent fits."""

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> "UntilClose":
        return self


class Connection(HttpToolsProtocol):
    """Reads requests until one has to be refused; those before it are still answered."""

    settings: ServerConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_header = False
        self._header_bytes = self._num_headers = 0
        self._unanswered: list[RequestResponseCycle] = []
        """The first is being answered."""
        self._receiving: RequestResponseCycle | None = None
        """The request whose body is not all there."""
        self._refusal: RequestError | None = None
        self._is_closing = False
        self._clock: asyncio.TimerHandle | None = None
        self._begun = 0.0
        self._received = 0
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)
        for cycle in self._unanswered:
            _give_up(cycle)
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._unset_keepalive_if_required()
        if self._clock is None:
            self._start_clock()
        self._received += len(data)
        was_in_header = self._in_header
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or InvalidRequest("this is not an HTTP/1.1 request", code="invalid_http"))
            return
        if was_in_header and self._in_header:  # a part of it that no callback has seen
            self._header_bytes += len(data)
            if self._header_bytes > self.settings.max_header_bytes:
                self._refuse(self._too_many_bytes())

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]

    def _head_without_upgrade(self) -> bytes:
        """Of a request that offers another protocol, as Java's client does: the parser would leave its body out."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([method + b" " + self.url + b" HTTP/" + version, *lines, b"", b""])

    # What the parser calls; what these raise stops it

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._clock is None:  # behind the end of another request
            self._start_clock()
        self._in_header = True
        self._header_bytes = self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_header(len(name) + len(value))
        if self._in_header:  # not a trailer, behind the body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise InvalidRequest("this server is no proxy")
        if self.parser.should_upgrade():
            return  # it comes again
        self._in_header = False
        self._check_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":  # which knows no chunks
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, UntilClose()
        self._receiving = self.cycle
        self._unanswered.append(self.cycle)

    def _check_head(self) -> None:
        """As RFC 9112 asks, 3.2."""
        version, num_hosts = self.parser.get_http_version(), [name for name, _ in self.headers].count(b"host")
        if version not in ("1.0", "1.1") or num_hosts > 1 or (version == "1.1" and not num_hosts):
            what = "one header Host" if version in ("1.0", "1.1") else "version 1.1 or 1.0 of HTTP"
            self._refusal = InvalidRequest(f"a request must have {what}", code="invalid_http")
            raise self._refusal

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._receiving = None
        self._stop_clock()

    def on_response_complete(self) -> None:
        del self._unanswered[0]
        super().on_response_complete()
        waits_for_permission = self._receiving is not None and self.expect_100_continue and not self._receiving.body
        if not self._unanswered and (self._is_closing or waits_for_permission):
            self._say_last()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for that long. A connection is idle once the client has taken all that it was answered."""
        if self._clock is not None:
            return  # the next request is arriving, and has a time of its own
        if bytes_waiting(self.transport):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    # Bounds

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self.settings.max_header_bytes:
            self._refusal = self._too_many_bytes()
        elif self._num_headers > self.settings.max_header_count:
            self._refusal = HeaderTooLarge(
                f"a request may have {self.settings.max_header_count} headers; this one has more",
                code="too_many_headers",
            )
        if self._refusal is not None:
            raise self._refusal

    def _too_many_bytes(self) -> HeaderTooLarge:
        limit = self.settings.max_header_bytes
        return HeaderTooLarge(f"a request's target and headers may have {limit} bytes", code="header_too_large")

    def _start_clock(self) -> None:
        self._begun = time.monotonic()
        self._received = 0
        self._clock = self.loop.call_later(self.settings.request_read_timeout, self._on_clock)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _on_clock(self) -> None:
        timeout = self.settings.request_read_timeout
        if self.flow.read_paused or any(cycle is not self._receiving for cycle in self._unanswered):
            self._clock = self.loop.call_later(timeout, self._on_clock)  # it waits for us
            return
        is_read = bool(self._unanswered) or self._in_header
        earned = self._received / BYTES_PER_SECOND if is_read else 0.0
        left = self._begun + timeout + earned - time.monotonic()
        if left > 0:
            self._clock = self.loop.call_later(left, self._on_clock)
        elif self._received == 0:  # a browser that had opened it in advance, say
            self.transport.close()
        else:
            self._refuse(TooSlow(f"the request did not arrive within {timeout:g} s", code="request_timeout"))

    # The end

    def _refuse(self, error: RequestError) -> None:
        """Take nothing more; answer with `error` behind the answers to what came before."""
        self._refusal = error
        self._is_closing = True
        self._stop_clock()
        unfinished, self._receiving = self._receiving, None
        if unfinished in self._unanswered:
            _give_up(unfinished)
            self._unanswered.remove(unfinished)
            self.pipeline = type(self.pipeline)(one for one in self.pipeline if one[0] is not unfinished)
        if unfinished is not None and unfinished.response_started:
            self._refusal = None  # it has an answer already
        if not self._unanswered:
            self._say_last()

    def _error_response(self, error: RequestError) -> bytes:
        body = openai_error(error)
        headers = [
            *self.server_state.default_headers,
            (HEADER, request_id(None).encode()),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
        return status + b"".join(name + b": " + value + b"\r\n" for name, value in headers) + b"\r\n" + body

    def _say_last(self) -> None:
        self._is_closing = True
        self._stop_clock()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self._refusal is not None:
            self.transport.write(self._error_response(self._refusal))
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.abort)


def _give_up(cycle: RequestResponseCycle) -> None:
    """Tell the application that nobody reads its answer."""
    cycle.disconnected = True
    cycle.message_event.set()


def connection_class(config: ServerConfig) -> type[Any]:
    """`Connection` with these settings; uvicorn makes one for each client."""
    return type("Connection", (Connection,), {"settings": config})
