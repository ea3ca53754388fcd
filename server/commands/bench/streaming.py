"""`octavo bench streaming MODEL`: processor time of the API process per streamed token.

Everything but the model is real: tokenizer, sockets, HTTP. The core is engine/bench/stub_core.py, the client a third
process. Streams of one token and of many are measured; the difference is the tokens' share.
"""

import argparse
import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import Any

from configs.settings import EngineConfig, ServerConfig
from engine.async_engine import AsyncEngine
from server.commands.serve import loop_factory
from server.http_server import make_server
from server.listener import bind

from .quality import TEXT
from .report import print_report

PROMPT_CHARACTERS = 400
LINES = {
    "tokens_per_event": "{:.2f}",
    "us_per_token": "{:.1f}",
    "us_per_event": "{:.1f}",
    "us_per_request": "{:.0f}",
}


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        report = runner.run(_measure(config, arguments))
    for name, form in LINES.items():
        print(f"{name.replace('_', ' '):22}{form.format(report[name]):>12}")
    print_report("streaming", config, report)
    return 0


async def _measure(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    engine = await AsyncEngine.start(config, core=("engine.bench.stub_core", str(arguments.step_ms)))
    with bind("127.0.0.1", 0) as listener:
        server = make_server(engine, ServerConfig(), "stub")
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        command = (sys.executable, "-m", "server.commands.bench.streaming_client", str(listener.getsockname()[1]))
        client = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        try:
            await _round(client, arguments.streams, 1)  # first times cost more
            requests = await _round(client, arguments.streams, 1)
            whole = await _round(client, arguments.streams, arguments.output_len + 1)
        finally:
            assert client.stdin is not None
            client.stdin.close()
            server.stop()
            await asyncio.gather(serving, client.wait())
            await engine.shutdown()
    micros_per_token = (whole["seconds"] - requests["seconds"]) * 1e6 / (arguments.streams * arguments.output_len)
    # each answer has one more token, and one more event that says why it ended
    tokens_per_event = arguments.streams * (arguments.output_len + 1) / (whole["events"] - arguments.streams)
    return {
        "streams": arguments.streams,
        "output_len": arguments.output_len,
        "step_ms": arguments.step_ms,
        "tokens_per_event": round(tokens_per_event, 3),
        "us_per_token": round(micros_per_token, 2),
        "us_per_event": round(micros_per_token * tokens_per_event, 2),
        "us_per_request": round(requests["seconds"] * 1e6 / arguments.streams, 1),
    }


async def _round(client: Process, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """What the client received, and the seconds of processor time that this process spent."""
    prompt = TEXT.read_text(encoding="utf-8")[:PROMPT_CHARACTERS]
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    assert client.stdin is not None
    assert client.stdout is not None
    started = time.process_time()
    client.stdin.write(json.dumps({"streams": num_streams, "body": body}).encode() + b"\n")
    received: dict[str, Any] = json.loads(await client.stdout.readline())
    return {**received, "seconds": time.process_time() - started}
