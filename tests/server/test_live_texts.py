"""Long texts and large bodies beside other requests, and at the end of the server; bounds allow for a busy machine."""

import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.test_live_server import LiveServer, live_server

WORDS = "hello world "
CHAT = {"messages": [{"role": "user", "content": "Say one two three"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("texts") / "log") as running:
        running.wait_ready()
        yield running


def truncated(num_characters: int) -> dict[str, object]:
    """A request whose text has to be encoded, however long it is."""
    return {"prompt": WORDS * (num_characters // len(WORDS)), "truncate_prompt_tokens": 8, "max_tokens": 1}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_a_text_that_cannot_fit_costs_neither_time_nor_memory(server: LiveServer, path: str) -> None:
    text = WORDS * 1_000_000
    body = {"prompt": text} if "chat" not in path else {"messages": [{"role": "user", "content": text}]}
    process = psutil.Process(server.process.pid)
    memory, cpu = process.memory_info().rss, process.cpu_times()
    answer = httpx.post(server.url + path, json={**body, "max_tokens": 1}, timeout=120)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in answer.json()["error"]["message"]
    assert process.cpu_times().user - cpu.user < 2.5, "it takes five seconds to encode"
    assert process.memory_info().rss - memory < 400 * 2**20, "it takes a gigabyte to encode"


@pytest.mark.timeout(300)
def test_a_chat_waits_for_no_long_text(server: LiveServer) -> None:
    with ThreadPoolExecutor(4) as threads:
        posts = [
            threads.submit(httpx.post, f"{server.url}/v1/completions", json=truncated(3_000_000), timeout=240)
            for _ in range(4)
        ]
        time.sleep(1)
        assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
        assert sum(post.done() for post in posts) < 2, "the chat came behind them"
        answers = [post.result() for post in posts]
    assert {answer.json()["usage"]["prompt_tokens"] for answer in answers} == {8}
    assert psutil.Process(server.process.pid).memory_info().rss < 700 * 2**20


@pytest.mark.timeout(120)
def test_a_text_under_way_does_not_hold_up_the_servers_end(tmp_path: Path) -> None:
    with live_server(tmp_path / "log", "--shutdown-timeout", "1") as server, ThreadPoolExecutor(3) as threads:
        server.wait_ready()
        posts = [
            threads.submit(httpx.post, server.url + path, json=body, timeout=100)
            for path, body in (
                ("/v1/completions", truncated(30_000_000)),
                ("/v1/completions", truncated(30_000_000)),
                ("/v1/messages", {"messages": [{"role": "user", "content": WORDS * 30_000}], "max_tokens": 1}),
            )
        ]
        time.sleep(2.5)
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=8)
        for post in posts[:2]:
            answer = post.result()
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "shutting_down"
        assert server.process.returncode == 0
        assert "Traceback" not in server.log.read_text()
        assert not psutil.wait_procs(children, 5)[1]


def numbered(pattern: str, count: int) -> str:
    return ",".join(pattern.replace("#", str(index)) for index in range(count))


MESSAGE = '{"role":"user","content":"hi"}'
FIELDS = numbered('"#":1', 2_400_000)
BODIES = {
    "unknown fields": ("/v1/chat/completions", f'{{"messages":[{MESSAGE}],{FIELDS}}}'),
    **{
        f"{count} in {field} of {path}": (path, f'{{"max_tokens":16,"{field}":[{numbered(MESSAGE, count)}]}}')
        for count in (50_000, 240_000)
        for path, field in (
            ("/v1/chat/completions", "messages"),
            ("/v1/messages", "messages"),
            ("/v1/responses", "input"),
        )
    },
    "3,000,000 token ids": ("/detokenize", '{"tokens":[' + numbered("123", 3_000_000) + "]}"),
    "900,000 token ids": ("/detokenize", '{"tokens":[' + numbered("123", 900_000) + "]}"),
    "a text": ("/v1/completions", json.dumps({"prompt": WORDS * 2_500_000})),
    "embeddings": ("/v1/embeddings", json.dumps({"input": ["a"] * 1000})),
}


async def health_latencies(url: str, ended: asyncio.Event) -> list[float]:
    latencies = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while not ended.is_set():
            start = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            latencies.append(time.perf_counter() - start)
            await asyncio.sleep(0.02)
    return latencies


POST = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("POST", sys.argv[2], open(sys.argv[3], "rb").read(), {"content-type": "application/json"})
print(connection.getresponse().status)
"""
"""In a process of its own: sending megabytes would hold up those that measure."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_up_others(server: LiveServer, name: str, tmp_path: Path) -> None:
    """The event loop that answers /health is the one that streams."""
    path, body = BODIES[name]
    (tmp_path / "body").write_text(body)
    ended = asyncio.Event()
    health = asyncio.create_task(health_latencies(server.url, ended))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", POST, str(server.port), path, str(tmp_path / "body")), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    ended.set()
    latencies = await health
    assert output.strip() in (b"200", b"400")
    assert max(latencies) < max(1.0, 20 * statistics.median(latencies)), sorted(latencies)[-5:]
