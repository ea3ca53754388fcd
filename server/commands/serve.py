"""`octavo serve MODEL`: the HTTP server."""

import argparse
import asyncio
import gc
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

from configs.errors import UsageError, printable
from configs.settings import ServerConfig
from configs.sources import unknown_variables
from engine.async_engine import AsyncEngine
from engine.bundled import BUNDLED
from engine.log_lines import configure
from engine.messages import CoreReady
from engine.supervisor import Supervision
from server import version
from server.listener import bind, bind_unix, raise_descriptor_limit
from server.metrics.records import current_request_id
from server.security import check_security

logger = logging.getLogger(__name__)


def run(config: ServerConfig, arguments: argparse.Namespace) -> int:
    configure(config.log_level, config.log_format, "server", current_request_id)
    if config.log_level == "info":
        logging.getLogger("uvicorn.error").setLevel("WARNING")  # its start and end are told better below
    warning = check_security(config)
    if config.otlp_traces_endpoint is not None:
        importlib.import_module("server.metrics.tracing")  # says at once which packages it lacks
    raise_descriptor_limit()
    bound = bind_unix(config.uds) if config.uds else bind(config.host, config.port)
    for one in [*unknown_variables(os.environ), *arguments.passed, *([warning] if warning else [])]:
        logger.warning(one)
    with bound as listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        death = runner.run(_serve(config, listener))
    if death is not None:
        print("octavo: error:", printable(death), file=sys.stderr)
    return 0 if death is None else 1


def model_name(config: ServerConfig) -> str:
    """The name that answers hold: the first that is given, or the bundled name, or the stem of the folder or file."""
    for name in filter(None, config.served_model_name or ()):
        return name
    if config.model in BUNDLED:
        return config.model
    path = Path(config.model).resolve()
    return path.stem if path.suffix == ".gguf" else path.name


async def _serve(config: ServerConfig, listener: socket.socket) -> str | None:
    """Until the server was told to end; or, with the reason, until the engine is dead. Raises `UsageError`."""
    _say(config, f"Octavo {version()}: loading {config.model}")
    importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, "server.http_server"))
    starting = asyncio.create_task(_start_engine(config))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, starting.cancel)
    try:
        http_server, engine = await importing, await starting
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) and task.cancelling():  # Ctrl-C
            raise
        raise UsageError("stopped while loading") from error
    try:
        server = http_server.make_server(engine, config, model_name(config))
        gc.freeze()  # what was loaded stays: collections need not walk it
        server.stop_on_signals()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.002)
        _say(config, *_start_message(config, engine.info, engine.default_sampling, listener))
        death = asyncio.ensure_future(engine.wait_death())
        await asyncio.wait({serving, death}, return_when=asyncio.FIRST_COMPLETED)
        server.end()
        await serving
        return death.result() if death.done() else None
    finally:
        await engine.shutdown()


def _say(config: ServerConfig, *lines: str) -> None:
    """To whoever has started the server; programs read the log."""
    text = "\n".join(map(printable, lines))
    if config.log_format == "json":
        logger.info(text)
        return
    try:
        print(text, flush=True)
    except OSError as error:  # a full disk, or a pipe without a reader
        logger.warning("cannot write to standard output: %s", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _start_engine(config: ServerConfig) -> Coroutine[Any, Any, AsyncEngine]:
    supervision = Supervision(
        max_restarts=config.max_restarts,
        patience=config.restart_patience,
        step_timeout=config.step_timeout,
        unresponsive_timeout=config.unresponsive_timeout,
    )
    return AsyncEngine.start(
        config,
        supervision=supervision,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
    )


def _start_message(
    config: ServerConfig, info: CoreReady, sampling: dict[str, Any], listener: socket.socket
) -> list[str]:
    """What is served and how, where the start-up's time went, and a request to try."""
    url = f"{'https' if config.ssl_certfile else 'http'}://{'localhost' if config.uds else _address(listener)}"
    to_socket = f" --unix-socket {config.uds}" if config.uds else ""
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if config.api_key or config.api_key_file else ""
    defaults = ", ".join(f"{name} {value}" for name, value in sampling.items())
    total = seconds_since_process_start()
    phases = {**info.timings, "other": max(0.0, total - sum(info.timings.values()))}
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    return [
        f"  model      {model_name(config)}: {info.architecture}, {info.num_parameters / 1e6:,.1f} million parameters",
        f"  machine    {info.device}, {info.num_threads} threads, {info.dtype}, quantization {info.quantization}",
        f"  attention  {info.attention_backend}",
        *(f"  note       {note}" for note in info.notes),
        f"  KV cache   {info.kv_cache_tokens:,} tokens of {info.kv_cache_dtype} in blocks of {info.block_size};"
        f" context {info.max_model_len:,} tokens",
        *([f"  sampling   {defaults}, unless a request says otherwise"] if sampling else []),
        f"  start-up   {total:.2f} s: " + ", ".join(f"{phase} {took:.2f}" for phase, took in phases.items()),
        f"Serving on {config.uds or url}. Try:",
        f"  curl -N{to_socket} {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
    ]


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    return f"{host}:{port}"


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
