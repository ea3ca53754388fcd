"""The real server under the real client: many chats at once, some of them cancelled."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.test_live_server import LiveServer, live_server

NUM_CHATS = 50
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its cache holds about a third of the chats at once, so that requests wait and are preempted."""
    with live_server(tmp_path_factory.mktemp("load") / "log", "--kv-cache-tokens", "1024") as running:
        running.wait_ready()
        yield running


def messages(number: int) -> list[dict[str, str]]:
    question = f"My secret word is W{number * 7919}. Write one sentence about the number {number}."
    return [{"role": "user", "content": question + " Be kind." * (number % 7)}]


async def answer(client: openai.AsyncOpenAI, number: int) -> str:
    stream = await client.chat.completions.create(
        model="smollm2", messages=messages(number), temperature=0, max_tokens=NUM_TOKENS, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def cancelled(client: openai.AsyncOpenAI, number: int) -> None:
    """Goes away after a few tokens; then asks again at once and goes away before the first."""
    for num_chunks in (1 + number % 5, 0):
        stream = await client.chat.completions.create(
            model="smollm2", messages=messages(number), temperature=0, max_tokens=150, stream=True
        )
        async with stream:
            for _ in range(num_chunks):
                await anext(aiter(stream))


@pytest.mark.timeout(240)
async def test_fifty_chats_while_a_third_is_cancelled(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        kept = [number for number in range(NUM_CHATS) if number % 3]
        expected = [await answer(client, number) for number in kept]
        assert len(set(expected)) > len(kept) // 2, "the answers must tell the chats apart"
        work = [answer(client, n) if n % 3 else cancelled(client, n) for n in range(NUM_CHATS)]
        results = await asyncio.gather(*work)
    assert [result for result in results if result is not None] == expected
    assert httpx.get(f"{server.url}/health").status_code == 200
