"""Processes that are killed, frozen and told to end, with a tiny checkpoint so that they start soon."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.tiny_models import write_tiny
from tests.server.test_live_server import LiveServer, live_server

CONTEXT = ("--max-model-len", "1024", "--kv-cache-tokens", "16384", "--num-threads", "1")
LONG = {"prompt": "x", "max_tokens": 1000}
SHORT = {"prompt": "x", "max_tokens": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("log") / "log", *CONTEXT, model=folder) as running:
        running.wait_ready()
        yield running


@contextlib.contextmanager
def started(folder: str, log: Path, *flags: str, prefix: Sequence[str] = ()) -> Iterator[LiveServer]:
    with live_server(log / "log", *CONTEXT, *flags, model=folder, prefix=prefix) as running:
        running.wait_ready()
        yield running


def core_of(server: LiveServer) -> psutil.Process:
    [core] = [child for child in server.children() if "engine.core_process" in child.cmdline()]
    return core


def health(server: LiveServer, kind: str) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/health/{kind}", timeout=5)
    return answer.status_code, answer.json()["status"]


def wait_for(expected: tuple[int, str], server: LiveServer, kind: str, seconds: float) -> float:
    """Seconds that it took."""
    start = time.monotonic()
    while (found := health(server, kind)) != expected:
        assert time.monotonic() - start < seconds, (found, server.log.read_text())
        time.sleep(0.05)
    return time.monotonic() - start


class Reader(threading.Thread):
    """Reads a stream to its end, or as far as it comes."""

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.fields = {**LONG, **fields}
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError), self.server.opened_stream(**self.fields) as stream:
            for line in filter(None, stream.iter_lines()):
                self.lines.append(line.removeprefix("data: "))
                self.begun.set()
        self.ended = time.monotonic()

    @property
    def last(self) -> dict[str, Any]:
        return dict(json.loads(self.lines[-1]))


def test_a_core_that_is_killed_is_replaced(server: LiveServer) -> None:
    answer = server.post(**SHORT)["choices"]
    stored = httpx.post(f"{server.url}/v1/responses", json={"input": "x", "max_output_tokens": 5}).json()
    readers = [Reader(server, prompt=f"{number}") for number in range(8)]
    assert all(reader.begun.wait(10) for reader in readers)
    first = core_of(server)
    first.kill()
    killed = time.monotonic()
    for reader in readers:
        reader.join(10)
        assert reader.ended - killed < 2
        assert reader.last["error"]["code"] == "engine_dead"
    assert server.post(**SHORT)["choices"] == answer, "a request that comes meanwhile waits for the new core"
    assert health(server, "ready") == (200, "ok")
    assert core_of(server).pid != first.pid
    assert httpx.get(f"{server.url}/v1/responses/{stored['id']}").json() == stored
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}


def test_a_frozen_core_is_told_and_its_streams_go_on(server: LiveServer) -> None:
    expected = server.stream(**LONG)[-1]["choices"][0]["finish_reason"]
    reader = Reader(server)
    assert reader.begun.wait(10)
    core = core_of(server)
    core.suspend()
    try:
        assert wait_for((503, "frozen"), server, "live", 6) > 1
        assert health(server, "ready") == (503, "frozen")
    finally:
        core.resume()
    assert wait_for((200, "ok"), server, "ready", 3) < 2
    assert health(server, "live") == (200, "ok")
    reader.join(20)
    assert json.loads(reader.lines[-2])["choices"][0]["finish_reason"] == expected
    assert reader.lines[-1] == "[DONE]"


def test_a_deadline_cuts_what_runs_and_drops_what_waits(server: LiveServer) -> None:
    start = time.monotonic()
    begun = server.post(**LONG, ignore_eos=True, timeout_s=0.1, n=8)
    assert time.monotonic() - start < 5
    reasons = [choice["finish_reason"] for choice in begun["choices"]]
    assert reasons == ["timeout"] * 8
    assert 0 < begun["usage"]["completion_tokens"] < 8 * 1000
    readers = [Reader(server) for _ in range(8)]  # as many as may run at once
    assert all(reader.begun.wait(10) for reader in readers)
    waited = server.post(**SHORT, timeout_s=0.05)
    assert waited["choices"][0]["finish_reason"] == "timeout"
    assert (waited["choices"][0]["text"], waited["usage"]["completion_tokens"]) == ("", 0)
    for reader in readers:
        reader.join(30)
        assert reader.lines[-1] == "[DONE]"


def check_gone(server: LiveServer, processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=2)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    socket.create_server(("127.0.0.1", server.port)).close()


def test_a_server_whose_cores_keep_ending_ends(folder: str, tmp_path: Path) -> None:
    with started(folder, tmp_path, "--max-restarts", "1") as server:
        for _ in range(2):
            core = core_of(server)
            core.kill()
            core.wait(5)
            if server.process.poll() is None:
                wait_for_new(server)
        assert server.process.wait(10) == 1
        last = server.log.read_text().splitlines()[-1]
        assert last.startswith("octavo: error: the engine ended 2 times in a row before it answered a request")
        check_gone(server, [core])


def wait_for_new(server: LiveServer) -> None:
    """Until there is a core, ready or not, or no server."""
    for _ in range(200):
        with contextlib.suppress(ValueError, psutil.NoSuchProcess):
            core_of(server)
            return
        if server.process.poll() is not None:
            return
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, ""), (signal.SIGTERM, 2, "stopped while loading")]
)
def test_a_signal_ends_a_server_that_loads(folder: str, tmp_path: Path, number: int, code: int, said: str) -> None:
    with live_server(tmp_path / "log", *CONTEXT, model=folder) as server:
        while "loading" not in server.log.read_text() or not (processes := server.children()):
            time.sleep(0.01)
        server.process.send_signal(number)
        assert server.process.wait(20) == code
        assert "".join(server.log.read_text().splitlines()[1:]).removeprefix("octavo: error: ") == said
        check_gone(server, processes)


def test_sigterm_to_all_processes_lets_what_runs_finish(folder: str, tmp_path: Path) -> None:
    with started(folder, tmp_path) as server, httpx.Client() as idle:
        idle.get(f"{server.url}/health")
        processes = server.children()
        background = httpx.post(f"{server.url}/v1/responses", json={"input": "x", "background": True}).json()
        readers = [Reader(server, ignore_eos=True) for _ in range(4)]
        assert all(reader.begun.wait(10) for reader in readers)
        for process in (server.process, *processes):  # as systemd does
            process.send_signal(signal.SIGTERM)
        refused = None
        while refused is None or refused.status_code == 200:
            refused = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=20)
        assert refused.status_code == 503
        assert (refused.headers["connection"], refused.json()["error"]["code"]) == ("close", "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        assert health(server, "ready") == (503, "draining")
        assert health(server, "live") == (200, "draining")
        polled = httpx.get(f"{server.url}/v1/responses/{background['id']}").json()
        assert polled["status"] in ("queued", "in_progress", "completed", "incomplete")
        for reader in readers:
            reader.join(30)
            assert json.loads(reader.lines[-2])["choices"][0]["finish_reason"] == "length"
            assert reader.lines[-1] == "[DONE]"
        assert server.process.wait(10) == 0
        check_gone(server, processes)


def test_a_second_signal_ends_the_server_at_once(folder: str, tmp_path: Path) -> None:
    """Here with a standard output that takes nothing, which is no reason to end before."""
    with started(folder, tmp_path, prefix=("sh", "-c", 'exec "$@" >/dev/full', "sh")) as server:
        processes = server.children()
        core = core_of(server)
        reader = Reader(server)
        assert reader.begun.wait(10)
        core.suspend()  # nothing ends of itself
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        assert server.process.wait(5) == 0
        assert time.monotonic() - asked < 2
        check_gone(server, processes)
        assert "cannot write to standard output: No space left on device" in server.log.read_text()


def test_the_engine_ends_with_a_server_that_is_killed(folder: str, tmp_path: Path) -> None:
    with started(folder, tmp_path) as server:
        processes = server.children()
        reader = Reader(server)
        assert reader.begun.wait(10)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(5)
        check_gone(server, processes)
