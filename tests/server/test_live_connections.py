"""Crowds of clients with few file descriptors for them, silent ones, slow ones, and some that never read."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from server.listener import raise_descriptor_limit
from tests.engine.tiny_models import write_tiny
from tests.server.test_live_server import LiveServer, live_server

NUM_FILES = 256
NUM_CLIENTS = 1000
FLAGS = ("--max-model-len", "1024", "--kv-cache-tokens", "16384", "--num-threads", "1", "--client-timeout", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    few = ("sh", "-c", f'ulimit -n {NUM_FILES} && exec "$@"', "sh")
    with live_server(folder / "log", *FLAGS, model=str(folder), prefix=few) as running:
        running.wait_ready()
        yield running


def request(**fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class Crowd:
    """All at once; each connection stays open until all are through, as clients with a pool keep theirs. Who is turned
    away comes again, as clients do."""

    def __init__(self, server: LiveServer, size: int) -> None:
        self.server = server
        self.size = size
        self.statuses: list[str] = []
        self.finished = asyncio.Event()

    async def answers(self) -> list[str]:
        await asyncio.gather(*(self._come_until_answered() for _ in range(self.size)))
        return self.statuses

    async def _come_until_answered(self) -> None:
        while True:
            try:
                await self._answer()
                return
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.2)

    async def _answer(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(request(prompt="x", max_tokens=1))
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].split("\r\n")[0])
            assert b'"completion_tokens":1' in await reader.readexactly(length)
            self.statuses.append(head.split("\r\n")[0])
            if len(self.statuses) == self.size:
                self.finished.set()
            await self.finished.wait()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@pytest.mark.timeout(120)
async def test_a_crowd_is_answered_whatever_there_are_descriptors_for(server: LiveServer) -> None:
    raise_descriptor_limit()
    assert set(await Crowd(server, NUM_CLIENTS).answers()) == {"http/1.1 200 ok"}
    assert psutil.Process(server.process.pid).num_fds() <= NUM_FILES
    assert "connections are open, as many as may be" in server.log.read_text()


@pytest.mark.timeout(60)
async def test_the_engine_is_restarted_while_a_crowd_is_there(server: LiveServer) -> None:
    crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(NUM_CLIENTS)]
    [core] = [one for one in psutil.Process(server.process.pid).children() if one.status() != psutil.STATUS_ZOMBIE]
    core.kill()
    await asyncio.sleep(0.5)
    assert (await asyncio.to_thread(server.post, prompt="x", max_tokens=1))["usage"]["completion_tokens"] == 1
    for _, writer in crowd:
        writer.close()


@pytest.mark.timeout(60)
def test_silent_connections_make_way_and_cost_no_time(server: LiveServer) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(NUM_FILES + 50):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        process = psutil.Process(server.process.pid)
        before, start = sum(process.cpu_times()[:2]), time.monotonic()
        for _ in range(10):
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
            time.sleep(0.1)
        waited = time.monotonic() - start
        assert waited < 15
        assert sum(process.cpu_times()[:2]) - before < 0.25 * waited + 0.25
    assert server.post(prompt="x", max_tokens=1)["usage"]["completion_tokens"] == 1


HUGE = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "logprobs": 20, "n": 8, "stream": True}


def load(server: LiveServer) -> int:
    return int(httpx.get(f"{server.url}/load").json()["server_load"])


def connected(server: LiveServer, port: int) -> bool:
    connections = psutil.Process(server.process.pid).net_connections()
    return any(one.raddr and one.raddr.port == port and one.status == "ESTABLISHED" for one in connections)


@pytest.mark.timeout(60)
def test_a_client_that_never_reads_is_cut_off(server: LiveServer) -> None:
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", server.port))
        port = stuck.getsockname()[1]
        stuck.sendall(request(**HUGE))
        start = time.monotonic()
        while load(server) == 0 and time.monotonic() - start < 5:
            time.sleep(0.02)
        while load(server) or connected(server, port):
            assert time.monotonic() - start < 40
            time.sleep(0.1)
    assert server.post(prompt="x", max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.timeout(60)
def test_a_slow_reader_with_a_small_window_is_not_cut_off(server: LiveServer) -> None:
    """Always less than the server would send at once, for several times --client-timeout."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(request(**HUGE))
        for _ in range(50):
            time.sleep(0.1)
            assert slow.recv(1600)


@pytest.mark.timeout(60)
def test_a_slow_reader_gets_everything(server: LiveServer) -> None:
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(request(**HUGE | {"n": 1, "logprobs": 1}))
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            time.sleep(0.005)
            piece = slow.recv(4096)
            assert piece, received[-100:]
            received += piece
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == 1000
    assert choices[-1]["finish_reason"] == "length"
