"""What one connection may send, hold and for how long; and TLS. By raw bytes, to a real server."""

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from configs.errors import SettingsError, UsageError
from configs.settings import ServerConfig
from server import cli
from server.http_server import make_server
from server.listener import bind, bind_unix
from server.security import check_security
from tests.server.conftest import MODEL, running_server
from tests.server.fake_engine import FakeEngine
from tests.server.test_live_server import live_server

READ_TIMEOUT = 0.4
CONFIG = ServerConfig(
    max_header_bytes=2000, max_header_count=20, max_body_bytes=100_000, request_read_timeout=READ_TIMEOUT
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def port(engine: FakeEngine) -> Iterator[int]:
    with running_server(engine, CONFIG) as url:
        yield int(url.rpartition(":")[2])


def post(path: str, body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


def exchange(port: int, *pieces: bytes, pause: float = 0.0, timeout: float = 5.0) -> bytes:
    """What comes until the server closes; pieces are sent while it comes, and no more when the server has closed."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as client:

        def read() -> None:
            with contextlib.suppress(OSError):
                while piece := client.recv(65536):
                    received.extend(piece)

        reading = threading.Thread(target=read)
        reading.start()
        for piece in pieces:
            if not reading.is_alive():
                break
            with contextlib.suppress(OSError):
                client.sendall(piece)
            time.sleep(pause)
        reading.join(timeout)
        assert not reading.is_alive(), bytes(received)
    return bytes(received)


def answers(received: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of each answer; nothing else may have come."""
    found = []
    while received:
        head, separator, received = received.partition(b"\r\n\r\n")
        assert separator, head
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        assert status.startswith("HTTP/1.1 "), status
        size = int(headers["content-length"])
        found.append((int(status.split()[1]), headers, received[:size]))
        received = received[size:]
    return found


def check_refused(received: bytes, status: int, code: str) -> dict[str, str]:
    """One answer, an error object that closes the connection."""
    [(found, headers, body)] = answers(received)
    assert (found, json.loads(body)["error"]["code"]) == (status, code), body
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    return headers


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"hello\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /health\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\nHost: x\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"GET health HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
        b"GET / HTTP/1.1\r\nA : b\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n99999999999999999999\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a server that speaks none
    ],
)
def test_what_is_no_http(port: int, request_bytes: bytes) -> None:
    """uvicorn's own words, and the end of the connection."""
    [(status, headers, _)] = answers(exchange(port, request_bytes))
    assert (status, headers["connection"]) == (400, "close")


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 3000 + b"\r\n\r\n", "header_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x" * 3000 + b": y\r\n\r\n", "header_too_large"),
        (b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n", "header_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * 21 + b"\r\n", "too_many_headers"),
    ],
)
def test_headers_have_bounds(port: int, request_bytes: bytes, code: str) -> None:
    check_refused(exchange(port, request_bytes), 431, code)


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("beginning", [b"GET / HTTP/1.1\r\nA: ", CHUNKED + b"0\r\nA: ", CHUNKED + b"1;a=", b"\r\n"])
def test_what_has_no_end_is_not_kept(keeping_alive: int, beginning: bytes) -> None:
    """Of a header, a trailer, a chunk's extension: a hundred megabytes would stay in memory, copied again and again."""
    start = time.monotonic()
    received = exchange(keeping_alive, beginning, *[(b"\r\n" if beginning == b"\r\n" else b"xx") * 500_000] * 100)
    assert received == b"" or answers(received)[0][0] == 431
    assert time.monotonic() - start < 5


def test_headers_just_within_the_bounds(port: int) -> None:
    head = (
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        + b"A: x\r\n" * 17
        + b"B: "
        + b"x" * 1800
        + b"\r\n\r\n"
    )
    [(status, _, _)] = answers(exchange(port, head))
    assert status == 200


def test_trailers_are_no_headers(port: int) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    chunk = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    [(status, headers, _)] = answers(exchange(port, CHUNKED + chunk + b"X-Request-Id: trailer\r\n\r\n"))
    assert status == 200
    assert headers["x-request-id"] != "trailer"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", *[b" "] * 30],
        [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 30],
        [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"],
    ],
    ids=["bytes", "chunks", "nothing"],
)
def test_a_body_that_does_not_come_is_told_and_cut_off(port: int, pieces: list[bytes]) -> None:
    start = time.monotonic()
    check_refused(exchange(port, *pieces, pause=0.05), 408, "request_timeout")
    assert READ_TIMEOUT <= time.monotonic() - start < 3


@pytest.mark.parametrize(
    "pieces",
    [
        [b""],
        [b"GET /health HTTP/1.1\r\nHost: x\r\n", *[b"A: x\r\n"] * 20],
        [bytes([letter]) for letter in HEALTH],
        [b"\r\n"] * 20,
    ],
    ids=["nothing", "headers", "bytes", "line ends"],
)
@pytest.mark.parametrize("first", [b"", HEALTH, b"POST /no/such HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"])
def test_a_head_that_does_not_come_is_cut_off_without_a_word(port: int, first: bytes, pieces: list[bytes]) -> None:
    """Whether it is the connection's first, or follows a request, which is answered."""
    if first and pieces == [b""]:
        return  # the time of connections that are kept alive
    start = time.monotonic()
    received = exchange(port, *([first] if first else []), *pieces, pause=0.05)
    assert [status for status, _, _ in answers(received)] == ([200 if first == HEALTH else 404] if first else [])
    assert READ_TIMEOUT <= time.monotonic() - start < 3


def test_the_rest_of_a_refused_body_that_does_not_come_is_cut_off(port: int) -> None:
    head = b"POST /no/such HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    start = time.monotonic()
    [(status, _, _)] = answers(exchange(port, head, *[b" "] * 60, pause=0.05))
    assert status == 404
    assert READ_TIMEOUT <= time.monotonic() - start < 2.5


def test_a_large_body_has_more_time(port: int) -> None:
    """Of a slow network; the last byte comes after the time that a small one has."""
    request = post("/v1/completions", {"prompt": "a", "user": "x" * 90_000})
    first, last = request[:-1], request[-1:]
    [(status, _, _)] = answers(
        exchange(port, first.replace(b"Host: x", b"Host: x\r\nConnection: close"), last, pause=READ_TIMEOUT * 2)
    )
    assert status == 200


def test_a_stream_is_not_cut_off(engine: FakeEngine, port: int) -> None:
    """Whether the client says nothing more meanwhile, or sends half of its next request."""
    engine.delay = READ_TIMEOUT / 2
    try:
        stream = post("/v1/completions", {"prompt": "abcdef", "stream": True})
        for more in (b"", b"GET /health HT"):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                client.sendall(stream + more)
                received = b""
                while b"[DONE]" not in received:
                    piece = client.recv(65536)
                    assert piece, received
                    received += piece
            assert b"HTTP/1.1 408" not in received
    finally:
        engine.delay = 0.0


def test_requests_in_a_row_are_answered_in_order(port: int) -> None:
    names = [f"r{number}" for number in range(8)]
    requests = [
        post("/tokenize", {"prompt": "x" * number}, f"X-Request-Id: {name}") for number, name in enumerate(names)
    ]
    requests.insert(4, HEALTH.replace(b"x", b"x\r\nX-Request-Id: health"))
    requests.append(HEALTH.replace(b"x", b"x\r\nConnection: close\r\nX-Request-Id: last"))
    found = answers(exchange(port, b"".join(requests)))
    assert [status for status, _, _ in found] == [200] * 10
    assert [headers["x-request-id"] for _, headers, _ in found] == [*names[:4], "health", *names[4:], "last"]


def test_a_client_that_leaves_behind_requests_in_a_row_is_noticed(engine: FakeEngine, port: int) -> None:
    engine.delay = 0.5
    try:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(post("/v1/completions", {"prompt": "abcdef" * 20}) + HEALTH)
            while httpx.get(f"http://127.0.0.1:{port}/load").json()["server_load"] == 0:
                time.sleep(0.01)
        start = time.monotonic()
        while httpx.get(f"http://127.0.0.1:{port}/load").json()["server_load"]:
            assert time.monotonic() - start < 5
    finally:
        engine.delay = 0.0


def test_a_request_cut_in_any_place(port: int) -> None:
    request = post("/tokenize", {"prompt": "abc"}, "Connection: close")
    for place in range(1, len(request), 7):
        [(status, _, body)] = answers(exchange(port, request[:place], request[place:], pause=0.005))
        assert (status, json.loads(body)["count"]) == (200, 4)


@pytest.mark.parametrize("offer", ["h2c", "websocket", "nonsense"])
def test_offers_of_other_protocols_are_passed_over(port: int, offer: str) -> None:
    """Java's HTTP client makes one with its first request, and sends the body behind it."""
    upgrade = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {offer}", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk")
    request = post("/tokenize", {"prompt": "abc"}, *upgrade)
    last = post("/tokenize", {"prompt": "abcde"}, "Connection: close")
    for pieces in ([request + last], [request[:30], request[30:-3], request[-3:] + last[:10], last[10:]]):
        found = answers(exchange(port, *pieces, pause=0.02))
        assert [(status, json.loads(body)["count"]) for status, _, body in found] == [(200, 4), (200, 6)]


def test_a_refused_client_that_waits_for_permission_need_not_send_its_body(port: int) -> None:
    head = b"POST /no/such HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(head)
        assert client.recv(13) == b"HTTP/1.1 404 "


def test_a_refused_upload_gets_its_answer(port: int) -> None:
    """Though it goes on sending what nobody reads."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
    received = exchange(port, head, *[b"x" * 100_000] * 50, pause=0.01)
    [(status, _, _)] = answers(received)
    assert status == 413


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-DEF_1.2", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", False),
        ("a,b", False),
        ('"', False),
        ("", False),
    ],
)
def test_request_ids(port: int, given: str, kept: bool) -> None:
    url = f"http://127.0.0.1:{port}"
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/no/such", None),
        ("DELETE", "/health", None),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/tokenize", {}),
        ("POST", "/v1/completions", {"prompt": "a", "stream": True}),
    ):
        response = httpx.request(method, url + path, json=body, headers={"x-request-id": given.encode()})
        [name] = response.headers.get_list("x-request-id")
        assert name == given if kept else len(name) == 32


def test_ids_of_ours_differ(port: int) -> None:
    names = {httpx.get(f"http://127.0.0.1:{port}/health").headers["x-request-id"] for _ in range(5)}
    assert len(names) == 5


def test_no_more_connections_than_allowed() -> None:
    """Others wait; who says nothing makes room for them."""
    with running_server(FakeEngine(), ServerConfig(max_connections=2)) as url, contextlib.ExitStack() as opened:
        port = int(url.rpartition(":")[2])
        idle = [opened.enter_context(httpx.Client()) for _ in range(2)]
        for client in idle:
            assert client.get(f"{url}/health").status_code == 200
        [(status, _, _)] = answers(exchange(port, HEALTH.replace(b"x", b"x\r\nConnection: close")))
        assert status == 200


# TLS


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def certificate(folder: Path, name: str) -> None:
    """Signed by itself, in NAME.pem, with its key in NAME.key."""
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2")
    openssl(folder, *new, *subject, "-keyout", f"{name}.key", "-out", f"{name}.pem")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client", "other"):
        certificate(folder, name)
    openssl(folder, "pkey", "-in", "server.key", "-aes256", "-passout", "pass:x", "-out", "encrypted.key")
    (folder / "both.pem").write_text((folder / "server.key").read_text() + (folder / "server.pem").read_text())
    return folder


def trusting(folder: Path, client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "server.pem"))
    if client is not None:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    return context


@pytest.mark.parametrize("files", [("server.pem", "server.key"), ("both.pem", None)])
def test_tls(folder: Path, files: tuple[str, str | None]) -> None:
    key = str(folder / files[1]) if files[1] else None
    config = ServerConfig(ssl_certfile=str(folder / files[0]), ssl_keyfile=key, max_header_bytes=2**15)
    with running_server(FakeEngine(), config) as url:
        assert url.startswith("https://")
        with httpx.Client(verify=trusting(folder)) as client:
            answer = client.post(f"{url}/v1/completions", json={"prompt": "a"})
            assert answer.json()["choices"][0]["text"] == "<a>"
            with client.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
            for path, status in (("/health?" + "x" * 65_000, 431), ("/no/such", 404)):
                assert client.get(url + path).status_code == status
        old = trusting(folder)
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.TransportError), httpx.Client(verify=old) as client:
            client.get(f"{url}/health")
        with pytest.raises(httpx.TransportError):  # plain HTTP
            httpx.get(url.replace("https", "http") + "/health")


def test_clients_certificates(folder: Path) -> None:
    def status(url: str, client: str | None) -> int | None:
        try:
            with httpx.Client(verify=trusting(folder, client)) as http:
                return http.get(f"{url}/health").status_code
        except (httpx.TransportError, ssl.SSLError):
            return None

    files = {"ssl_certfile": str(folder / "both.pem"), "ssl_ca_certs": str(folder / "client.pem")}
    with running_server(FakeEngine(), ServerConfig(**files, ssl_cert_reqs=2)) as url:
        assert [status(url, one) for one in ("client", "other", None)] == [200, None, None]
    with running_server(FakeEngine(), ServerConfig(**files, ssl_cert_reqs=1)) as url:
        assert [status(url, one) for one in ("client", "other", None)] == [200, None, 200]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"ssl_certfile": "none.pem"}, ["--ssl-certfile none.pem", "No such file"]),
        ({"ssl_certfile": "."}, ["--ssl-certfile .", "directory"]),
        ({"ssl_certfile": "server.pem"}, ["--ssl-certfile server.pem", "no certificate with its private key"]),
        ({"ssl_certfile": "server.key"}, ["--ssl-certfile server.key", "PEM"]),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "none"}, ["--ssl-keyfile none", "No such file"]),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "other.key"},
            ["--ssl-keyfile other.key", "another certificate"],
        ),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "encrypted.key"}, ["encrypted", "openssl pkey"]),
        ({"ssl_certfile": "both.pem", "ssl_ca_certs": "server.key"}, ["--ssl-ca-certs server.key", "PEM"]),
        ({"ssl_certfile": "both.pem", "ssl_ca_certs": "none"}, ["--ssl-ca-certs none", "No such file"]),
        ({"ssl_certfile": "both.pem", "ssl_cert_reqs": 2}, ["--ssl-cert-reqs", "--ssl-ca-certs"]),
        ({"ssl_keyfile": "server.key"}, ["--ssl-keyfile", "--ssl-certfile"]),
        ({"ssl_ca_certs": "server.pem"}, ["--ssl-ca-certs", "--ssl-certfile"]),
    ],
)
def test_certificates_that_cannot_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Any], words: list[str]
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SettingsError) as caught:
        check_security(ServerConfig(**files))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_they_are_one_line_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--ssl-certfile", "/none.pem"], ["--api-key-file", "/none"], ["--ssl-cert-reqs", "3"]):
        assert cli.main(["serve", "no-such-model", *flags]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert flags[0] in captured.err


# a socket in the file system


def test_a_unix_socket(tmp_path: Path) -> None:
    """It serves, is for nobody else, replaces what a killed server has left, and goes with its server."""
    path = tmp_path / "octavo.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with live_server(tmp_path / "log", "--uds", str(path)) as server:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            while not server.log.read_text().count("Serving on"):
                assert server.process.poll() is None, server.log.read_text()
                time.sleep(0.05)
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert answer.json()["usage"]["completion_tokens"] == 2
        assert f"curl -N --unix-socket {path} http://localhost/v1/" in server.log.read_text()
        assert path.stat().st_mode & 0o777 == 0o660
        with pytest.raises(UsageError, match="in use"), bind_unix(str(path)):
            pass
        server.process.terminate()
        assert server.process.wait(timeout=10) == 0
    assert not path.exists()


def test_paths_that_can_be_no_socket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path in (tmp_path / "file", tmp_path / "no" / "such", tmp_path, tmp_path / ("x" * 200)):
        with pytest.raises(UsageError, match="--uds"), bind_unix(str(path)):
            pass
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        ("1.1", 1, 200),
        ("1.1", 0, 400),
        ("1.1", 2, 400),
        ("1.0", 0, 200),
        ("1.0", 1, 200),
        ("1.0", 2, 400),
    ],
)
def test_a_request_has_one_host_header(port: int, version: str, hosts: int, status: int) -> None:
    lines = [f"GET /health HTTP/{version}", *["Host: x"] * hosts, "Connection: close", "", ""]
    [(found, _, body)] = answers(exchange(port, "\r\n".join(lines).encode()))
    assert found == status
    assert status == 200 or json.loads(body)["error"]["code"] == "invalid_http"


def test_http_1_0(port: int) -> None:
    request = post("/v1/completions", {"prompt": "a"}).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
    [(status, headers, _)] = answers(exchange(port, request))
    assert (status, headers["connection"]) == (200, "close")


@pytest.fixture(scope="module")
def keeping_alive(engine: FakeEngine) -> Iterator[int]:
    """For a second."""
    with running_server(engine, ServerConfig(timeout_keep_alive=1, request_read_timeout=10)) as url:
        yield int(url.rpartition(":")[2])


def read_answer(client: socket.socket) -> bytes:
    """The body of one whole answer; empty where the server has closed."""
    received = b""
    while b"\r\n\r\n" not in received:
        if not (got := client.recv(1)):
            return b""
        received += got
    length = int(received.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = bytearray()
    while len(body) < length:
        got = client.recv(length - len(body))
        assert got, "cut"
        body += got
    return bytes(body)


def test_an_idle_connection_is_kept_for_as_long_as_the_setting_says(keeping_alive: int) -> None:
    with socket.create_connection(("127.0.0.1", keeping_alive), timeout=5) as client:
        for pause in (0.0, 0.6, 0.6):
            time.sleep(pause)
            client.sendall(HEALTH)
            assert read_answer(client)
        start = time.monotonic()
        assert client.recv(1) == b""
        assert 0.8 < time.monotonic() - start < 3
    assert ServerConfig().timeout_keep_alive >= 60


def test_what_arrives_when_the_time_is_over_is_still_answered(engine: FakeEngine) -> None:
    """Where the event loop was held up, it sees both at once."""

    async def exchange_late() -> bytes:
        listener = bind("127.0.0.1", 0)
        server = make_server(engine, ServerConfig(timeout_keep_alive=1), MODEL)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(HEALTH)
        await reader.readuntil(b"}")
        await asyncio.sleep(0.5)
        writer.write(HEALTH)
        time.sleep(1)
        answer = await asyncio.wait_for(reader.read(12), 5)
        writer.close()
        server.end()
        await serving
        return answer

    for new_loop in (None, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert runner.run(exchange_late()) == b"HTTP/1.1 200"
