"""A streamed token passes few functions between the core's message and the socket."""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.conftest import MODEL
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("engine", "server"))
NOT_ON_THE_PATH = ("metrics", "bench")
"""What counts for /metrics, and the stand-in for the core."""


def test_a_streamed_token_of_a_chat_passes_twelve_functions_at_most() -> None:
    calls: list[str] = []
    sent: list[int] = []
    """How many calls had been made when each piece of the answer was sent."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(PACKAGES)
        if is_ours and not any(f"/{name}/" in code.co_filename for name in NOT_ON_THE_PATH):
            calls.append(f"{Path(code.co_filename).name}:{code.co_qualname}")

    async def chat() -> None:
        app = create_app(FakeEngine(lambda prompt, params: "x" * 60), ServerConfig(), MODEL)

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            async def count(message: Any) -> None:
                sent.append(len(calls))
                await send(message)

            await app(scope, receive, count)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(counted), base_url="http://test") as client:
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200

    sys.setprofile(note)
    try:
        asyncio.run(chat())
    finally:
        sys.setprofile(None)
    functions = Counter(calls[sent[-6] : sent[-5]])
    received = 1  # CoreClient._receive, in whose place the stand-in delivers
    assert 5 < len(functions) + received <= 12, functions
