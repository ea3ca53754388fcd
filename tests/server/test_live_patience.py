"""The server stays responsive whatever one client asks for. Bounds tell a freeze of seconds from a busy machine."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest

from tests.server.test_live_server import LiveServer, live_server

LONGEST_SILENCE = 2.0
"""Seconds; tokenizing the huge prompt on the event loop, or computing the long one at a stretch, takes longer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--max-num-batched-tokens", "128", "--max-model-len", "8192", "--kv-cache-tokens", "16384")
    with live_server(tmp_path_factory.mktemp("patience") / "log", *flags) as running:
        running.wait_ready()
        yield running


async def silences(client: openai.AsyncOpenAI, started: asyncio.Event, ended: asyncio.Event) -> list[float]:
    """Seconds between the chunks of a stream that runs until `ended`."""
    stream = await client.completions.create(
        model="smollm2", prompt="One", max_tokens=4000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    gaps, last = [], time.perf_counter()
    async with stream:
        async for _ in stream:
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
            started.set()
            if ended.is_set():
                break
    return gaps[1:]


async def health_latencies(url: str, ended: asyncio.Event) -> list[float]:
    latencies = []
    async with httpx.AsyncClient() as client:
        while not ended.is_set():
            start = time.perf_counter()
            assert (await client.get(f"{url}/health", timeout=30)).status_code == 200
            latencies.append(time.perf_counter() - start)
            await asyncio.sleep(0.05)
    return latencies


@pytest.fixture
async def client(server: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["refused", "long"])
async def test_streams_and_health_go_on_beside_a_great_prompt(
    server: LiveServer, client: openai.AsyncOpenAI, kind: str
) -> None:
    """A prompt of megabytes is refused; one of many chunks is computed between the tokens of the others."""
    started, ended = asyncio.Event(), asyncio.Event()
    stream = asyncio.create_task(silences(client, started, ended))
    health = asyncio.create_task(health_latencies(server.url, ended))
    await asyncio.wait((stream, asyncio.create_task(started.wait())), return_when=asyncio.FIRST_COMPLETED)
    assert not stream.done()
    prompt = "All of it again. " * (400_000 if kind == "refused" else 700)
    try:
        if kind == "refused":
            with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens"):
                await client.completions.create(model="smollm2", prompt=prompt, max_tokens=1, timeout=120)
        else:
            answer = await client.completions.create(model="smollm2", prompt=prompt, max_tokens=1, timeout=120)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens > 20 * 128
    finally:
        ended.set()
    assert max(await stream) < LONGEST_SILENCE
    assert max(await health) < LONGEST_SILENCE
