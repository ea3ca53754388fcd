"""`octavo bench streaming MODEL`: processor time of the API process per streamed token.

Everything but the model is real: tokenizer, sockets, HTTP. The core is engine/bench/stub_core.py, the client a third
process, which is this module run as a program. Streams of one token and of many are measured; the difference is the
tokens' share.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from typing import Any

from configs.settings import EngineConfig, ServerConfig
from engine.async_engine import AsyncEngine
from server.commands.serve import loop_factory
from server.http_server import make_server
from server.listener import bind

from .inside import TEXT
from .report import print_lines, print_report
from .target import HttpClient

PROMPT_CHARACTERS = 400
LINES = {"tokens_per_event": "{:.2f}", "us_per_token": "{:.1f}", "us_per_event": "{:.1f}", "us_per_request": "{:.0f}"}


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Print microseconds per token, per event and per request."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        report = runner.run(_measure(config, arguments))
    print_lines(report, LINES)
    print_report("streaming", config, report)
    return 0


async def _measure(config: EngineConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    engine = await AsyncEngine.start(config, core=("engine.bench.stub_core", str(arguments.step_ms)))
    with bind("127.0.0.1", 0) as listener:
        server = make_server(engine, ServerConfig(), "stub")
        gc.freeze()  # what was loaded stays: collections need not walk it
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        command = (sys.executable, "-m", __name__, f"http://127.0.0.1:{listener.getsockname()[1]}")
        client = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        try:
            await _round(client, arguments.streams, 1)  # first times cost more
            requests = await _round(client, arguments.streams, 1)
            long = await _round(client, arguments.streams, arguments.output_len + 1)
        finally:
            assert client.stdin is not None
            client.stdin.close()
            server.stop()
            await asyncio.gather(serving, client.wait())
            await engine.shutdown()
    micros_per_token = (long["seconds"] - requests["seconds"]) * 1e6 / (arguments.streams * arguments.output_len)
    # each answer has one more token, and one more event that says why it ended
    tokens_per_event = arguments.streams * (arguments.output_len + 1) / (long["events"] - arguments.streams)
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


async def _read_streams(url: str, num_streams: int, body: bytes) -> int:
    """The number of events, each of which begins anew in what is received."""
    events = 0

    def count(piece: bytes, now: float) -> None:
        nonlocal events
        events += piece.count(b"data: {")

    client = HttpClient(url, timeout=3600.0)
    await asyncio.gather(*(client.request("POST", "/v1/completions", body, count) for _ in range(num_streams)))
    client.close()
    return events


def main() -> None:
    """The client. Standard input has a line of JSON with `streams` and `body` for each round, and standard output is
    given one with `events`. Nothing is parsed, so that the client's cores are left to the server."""
    [url] = sys.argv[1:]
    if hasattr(os, "SCHED_BATCH"):  # each piece would wake the client, which would interrupt what is measured
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for line in sys.stdin:
        round_ = json.loads(line)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            events = runner.run(_read_streams(url, round_["streams"], json.dumps(round_["body"]).encode()))
        print(json.dumps({"events": events}), flush=True)


if __name__ == "__main__":
    main()
