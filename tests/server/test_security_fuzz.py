"""Raw bytes that are hardly HTTP, drawn by hypothesis: the server answers them properly, or closes, and lives on."""

import contextlib
import json
import logging
import re
import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.settings import ServerConfig
from tests.server.conftest import running_server
from tests.server.fake_engine import FakeEngine

QUICK, LONG = 300, 10_000
"""Connections."""
CONFIG = ServerConfig(max_header_bytes=3000, max_header_count=30, max_body_bytes=5000, request_read_timeout=0.5)
BODY = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
REQUESTS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%b\r\n0\r\nA: b\r\n\r\n"
    % (len(BODY), BODY),
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{"prompt": "a", "stream": true}',
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n"
    b"Origin: http://localhost\r\nAccess-Control-Request-Method: POST\r\n\r\n",
    b"GET http://a.b/%2e%2e/health?a=b#c HTTP/1.0\r\nX-Request-Id: a\r\nAuthorization: Bearer x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhl\r\n\r\n\x81\x05hello",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
]
FRAGMENTS = [
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b":",
        b"\x00",
        b"\xff",
        b"\xc3\x28",
        b"%00",
        b"%",
        b"/",
        b"//",
        b"*",
    ),
    *(
        b"GET ",
        b"POST ",
        b"DELETE ",
        b"M-SEARCH ",
        b"/v1/completions",
        b"/health",
        b" HTTP/1.1",
        b" HTTP/1.0",
        b" HTTP/2",
    ),
    *(b"\r\nContent-Length: ", b"\r\nTransfer-Encoding: chunked", b"\r\nTransfer-Encoding: gzip, chunked", b"\r\nA: b"),
    *(
        b"0",
        b"-1",
        b"5",
        b"1e9",
        b"0x10",
        b"+5",
        b"18446744073709551616",
        b"ffffffffffffffff\r\n",
        b"9" * 400,
        b"0\r\n\r\n",
    ),
    *(
        b"\r\nExpect: 100-continue",
        b"\r\nConnection: close",
        b"\r\nConnection: upgrade, close\r\nUpgrade: h2c",
        b"\r\n A",
    ),
    *(
        b"\r\nContent-Type: text/html",
        b"\r\nOrigin: null",
        b"\r\nHost: \xe9",
        b"{",
        b"}",
        b'"',
        b"[" * 3000,
        b"x" * 4000,
    ),
]
ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n:]+: [^\r\n]*\r\n)*)\r\n")
STATUSES = {100, 200, 204, 400, 401, 403, 404, 405, 408, 413, 431}


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Requests in a row, in which some bytes are others."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = start + draw(st.sampled_from([0, 0, 1, 4, 30]))
        data[start:end] = draw(st.sampled_from(FRAGMENTS) | st.binary(max_size=8))
    return bytes(data[: draw(st.sampled_from([len(data)] * 3 + [draw(st.integers(0, len(data)))]))])


SOUP = st.lists(st.sampled_from(FRAGMENTS + REQUESTS) | st.binary(max_size=12), max_size=12).map(b"".join)
PIECES = st.tuples(mutated() | SOUP, st.lists(st.integers(0, 200), max_size=3))
"""Bytes, and the sizes in which they are sent; the rest in one."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running_server(FakeEngine(), CONFIG) as url:
        yield int(url.rpartition(":")[2])


class Complaints(logging.Handler):
    """What is logged as an error, or with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.found.append(self.format(record))


def exchange(port: int, data: bytes, sizes: list[int]) -> bytes:
    """What comes within a moment, or until the server closes."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client, contextlib.suppress(OSError):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in [*sizes, len(data)]:
            client.sendall(data[:size])
            data = data[size:]
        client.settimeout(0.015)
        while piece := client.recv(65536):
            received += piece
    return bytes(received)


def check_answers(received: bytes) -> None:
    """Whole answers, of which the last may be under way; no status that a fault of ours has."""
    while received:
        found = ANSWER.match(received)
        assert found, received
        assert int(found[1]) in STATUSES, received
        ends_connection = b"connection: close" in found[2]  # which may be no answer of the application's
        assert int(found[1]) == 100 or ends_connection or b"x-request-id: " in found[2], received
        length = re.search(rb"content-length: (\d+)", found[2])
        if length is None and int(found[1]) == 200:
            return  # a stream
        size = int(length[1]) if length else 0
        received = received[found.end() :]
        received = (
            received if received.startswith(b"HTTP/1.1 ") else received[size:]
        )  # the answer to a HEAD has no body


def run(port: int, count: int) -> None:
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(sent=PIECES)
    def is_answered(sent: tuple[bytes, list[int]]) -> None:
        check_answers(exchange(port, *sent))
        assert not complaints.found, complaints.found

    try:
        is_answered()
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "still here"})
        assert answer.json()["choices"][0]["text"] == "<still here>"
        assert not complaints.found, complaints.found
    finally:
        logging.getLogger().removeHandler(complaints)


def test_some_bytes(port: int) -> None:
    run(port, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_bytes(port: int) -> None:
    run(port, LONG)


@pytest.mark.parametrize("request_bytes", REQUESTS)
def test_what_is_drawn_from(port: int, request_bytes: bytes) -> None:
    """By itself, each is answered."""
    received = exchange(port, request_bytes, [])
    check_answers(received)
    assert received.startswith(b"HTTP/1.1 ")
