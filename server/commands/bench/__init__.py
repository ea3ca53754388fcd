"""`octavo bench WHAT MODEL|URL`: measurements. Each prints a table and, as the last line, one JSON document."""

import argparse
import importlib

from configs.settings import EngineConfig

MODULES = {"throughput": "offline", "latency": "offline", "kernels": "inside", "quality": "inside"}
"""Where the benchmarks are that share a module; the others have one of their own name."""


def run(config: EngineConfig | None, arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"server.commands.bench.{MODULES.get(arguments.bench, arguments.bench)}")
    code: int = module.run(config, arguments)
    return code
