"""`octavo bench WHAT MODEL`: measurements. Each prints a table for people and, as the last line, one JSON document."""

import argparse
import importlib

from configs.settings import EngineConfig


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    module = importlib.import_module(f"server.commands.bench.{arguments.bench}")
    code: int = module.run(config, arguments)
    return code
