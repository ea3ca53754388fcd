"""`octavo serve MODEL`: the HTTP server."""

import argparse
import asyncio
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from configs.errors import UsageError
from configs.settings import ServerConfig
from engine.async_engine import AsyncEngine
from engine.bundled import BUNDLED
from engine.messages import CoreReady
from server.listener import bind
from server.version import version


def run(config: ServerConfig, arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if config.log_level == "info":
        logging.getLogger("uvicorn.error").setLevel("WARNING")  # its start and end are told better below
    listener = bind(config.host, config.port)
    with listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(config, listener))
    return 0


def model_name(config: ServerConfig) -> str:
    """The name that clients use: given, or the bundled name, or the stem of the folder or file."""
    if config.served_model_name:
        return config.served_model_name
    if config.model in BUNDLED:
        return config.model
    path = Path(config.model).resolve()
    return path.stem if path.suffix == ".gguf" else path.name


async def _serve(config: ServerConfig, listener: socket.socket) -> None:
    name = model_name(config)
    print(f"Octavo {version()}: loading {config.model}", flush=True)
    importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, "server.http_server"))
    engine = await _interruptible(AsyncEngine.start(config))
    try:
        http_server = await importing
        server = http_server.make_server(engine, config, name)
        http_server.stop_on_signals(server)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.002)
        print(_start_message(name, engine.info, engine.default_sampling, listener), flush=True)
        await serving
    finally:
        await engine.shutdown()


async def _interruptible(work: Coroutine[Any, Any, AsyncEngine]) -> AsyncEngine:
    """Await `work`; SIGTERM cancels it as Ctrl-C does, so that nothing is left behind."""
    task = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError as error:
        raise UsageError("stopped while loading") from error


def _start_message(name: str, info: CoreReady, sampling: dict[str, Any], listener: socket.socket) -> str:
    """What is served and how, where the start-up's time went, and a request to try."""
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    total = seconds_since_process_start()
    phases = {**info.timings, "other": max(0.0, total - sum(info.timings.values()))}
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    lines = [
        f"  model      {name}: {info.architecture}, {info.num_parameters / 1e6:,.1f} million parameters",
        f"  machine    {info.device}, {info.num_threads} threads, {info.dtype}, quantization {info.quantization}",
        f"  attention  {info.attention_backend}",
        *(f"  note       {note}" for note in info.notes),
        f"  KV cache   {info.kv_cache_tokens:,} tokens of {info.kv_cache_dtype} in blocks of {info.block_size};"
        f" context {info.max_model_len:,} tokens",
        *([f"  sampling   {_fields(sampling)}, unless a request says otherwise"] if sampling else []),
        f"  start-up   {total:.2f} s: " + ", ".join(f"{phase} {took:.2f}" for phase, took in phases.items()),
        f"Serving on http://{host}:{port}. Try:",
        f"  curl -N http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
    ]
    return "\n".join(lines)


def _fields(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def seconds_since_process_start() -> float:
    """From the kernel's books where there are any (Linux), else the process's CPU time, which is less."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return time.process_time()


def loop_factory() -> Any:
    """uvloop has no Windows version; None is asyncio's own loop."""
    return None if sys.platform == "win32" else importlib.import_module("uvloop").new_event_loop
