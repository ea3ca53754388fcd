"""`octavo bench WHAT MODEL|URL`: measurements. Each prints a table and, as the last line, one JSON document."""

import argparse
import importlib

from configs.settings import EngineConfig


def run(config: EngineConfig | None, arguments: argparse.Namespace) -> int:
    """Settings come with the benchmarks of a model here, and none with those of a server elsewhere."""
    module = importlib.import_module(f"server.commands.bench.{'serve' if config is None else 'offline'}")
    code: int = module.run(config, arguments)
    return code
