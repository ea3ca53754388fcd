"""`octavo bench WHAT MODEL|URL`: measurements. Each prints a table and, as the last line, one JSON document."""

import argparse
import importlib

from configs.settings import EngineConfig


def run(config: EngineConfig | None, arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"server.commands.bench.{arguments.bench}")
    code: int = module.run(config, arguments)
    return code
